# shellcheck shell=bash
# Sourced by scripts: `ensure_venv` makes .venv with exactly what requirements.lock names, and the package itself.
# A second call is free: a stamp remembers the digest of what was installed. PYTHON chooses the interpreter.

ensure_venv() {
    local root python wanted stamp
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    python="${PYTHON:-python3}"
    stamp="$root/.venv/installed"
    wanted="$(cat "$root/requirements.lock" "$root/setup.py" | sha256sum | cut -d' ' -f1)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$root/.venv/bin/python" ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "requirements.lock is for Python 3.11 or newer; $python is $("$python" -V 2>&1). Set PYTHON." >&2
            return 1
        }
        echo "making .venv ($("$python" -V 2>&1))"
        "$python" -m venv "$root/.venv"
    fi
    echo "installing requirements.lock (a few minutes the first time)"
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.lock"
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        -e "$root"
    echo "$wanted" >"$stamp"
}
