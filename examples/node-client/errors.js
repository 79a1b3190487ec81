// What can go wrong, as the broker says it.

/** What the broker answered instead: `code` for programs, and whether trying again may help. */
export class RunnelError extends Error {
  constructor(code, text, retriable, details = {}) {
    super(text);
    Object.assign(this, { code, retriable, details });
  }
}
