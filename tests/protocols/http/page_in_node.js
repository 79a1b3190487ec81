"use strict";
// The script of /docs in Node.js: with as much of a document as it needs, a broker that answers what the test says,
// and a visitor who presses buttons. Reads {"script", "openapi", "answer"} from stdin, writes what was seen to stdout.

class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], listeners: {}, hidden: false, written: "" }); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  get textContent() { return this.children.map((each) => each.textContent ?? each).join(""); }
  set textContent(text) { this.children = [text]; }
  get value() { return this.tag === "select" && !this.written ? this.children[0].textContent : this.written; }
  set value(text) { this.written = text; }
  all(tag) {
    const inner = this.children.flatMap((each) => (each instanceof Element ? each.all(tag) : []));
    return this.tag === tag ? [this, ...inner] : inner;
  }
}

const given = JSON.parse(require("node:fs").readFileSync(0, "utf-8"));
const known = { token: new Element("input"), about: new Element("div"), operations: new Element("main") };
globalThis.document = { createElement: (tag) => new Element(tag), getElementById: (id) => known[id] };

const streams = [];
globalThis.fetch = async (target, { signal } = {}) => {
  if (target === "/openapi.json") return new Response(given.openapi);
  if (!target.startsWith("/v1/stream")) {
    return new Response(given.answer, { headers: { "content-type": "application/json" } });
  }
  streams.push(signal);
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(`event of stream ${streams.length}\n`));
      signal.addEventListener("abort", () => controller.error(signal.reason));
    },
  });
  return new Response(body, { headers: { "content-type": "text/event-stream" } });
};

const until = async (condition) => { while (!condition()) await new Promise(setImmediate); };
const shownOf = (method, path) => {
  const found = known.operations.all("details").find(({ children: [head] }) =>
    head.children.length === 3 && head.children[0].textContent === method && head.children[1].textContent === path);
  const [form] = found.all("form");
  const [send, stop] = form.all("button");
  if (`${send.textContent} ${stop.textContent}` !== "Send Stop") throw new Error("other buttons than expected");
  return {
    summary: found.children[0].textContent,
    output: found.all("pre")[0],
    stop,
    send: () => form.listeners.submit({ preventDefault() {} }),
  };
};
const streamState = ({ stop, output }) => (
  { isStopThere: !stop.hidden, aborted: streams.map((each) => each.aborted), text: output.textContent });

const visit = async () => {
  new Function(given.script)();
  await until(() => known.operations.all("form").length);
  const read = shownOf("GET", "/v1/topics/{topic}/messages");
  await read.send();
  const stream = shownOf("GET", "/v1/stream");
  stream.send();
  await until(() => stream.output.textContent.includes("event of stream 1"));
  const second = stream.send();
  await until(() => stream.output.textContent.includes("event of stream 2"));
  const afterSecond = streamState(stream);
  stream.stop.onclick();
  await second;
  process.stdout.write(JSON.stringify({
    answer: read.output.textContent.split("\n\n").slice(1).join("\n\n"),
    isReadStoppable: !read.stop.hidden,
    afterSecond,
    afterStop: streamState(stream),
    text: known.operations.textContent + known.about.textContent,
    codes: known.operations.all("code").map((each) => each.textContent),
    summary: stream.summary,
  }));
};
visit();
