# Sourced by the commands in bin/ with the names of the sets they need: makes sure that .venv holds
# them, then leaves `root` and `python` set. Finds an interpreter; the work is tools/environment.py's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python

fit() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        if fit "$PYTHON"; then echo "$PYTHON" && return; fi
        echo "PYTHON=$PYTHON does not run, or is older than 3.11." >&2
        return 1
    fi
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if fit "$candidate"; then echo "$candidate" && return; fi
    done
    echo "Runnel needs Python 3.11 or newer, and there is none on the PATH (python3.13, python3.12," >&2
    echo "python3.11, python3 and python were tried). Install one, or say where it is: PYTHON=/path/to/python" >&2
    return 1
}

# The fast path: the environment's own interpreter confirms that nothing has to be done.
if [[ -n ${PYTHON:-} ]] || ! "$python" -I -S "$root/tools/environment.py" --check "$@" 2>/dev/null; then
    base=$(find_python)
    "$base" -I "$root/tools/environment.py" "$@" </dev/null
fi
