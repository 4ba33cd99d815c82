#!/usr/bin/env bash
# Compare with other people's packages (transformers, megatron-core, ...), which live in .interop beside .venv.
# Installs them where they are missing; without a package index it says so and tests what is there.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=tools/venv.sh
. tools/venv.sh
ensure_venv
wanted="$(sha256sum <tests/interop/requirements.lock)"
if [ "$(cat .interop/installed 2>/dev/null)" != "$wanted" ]; then
    rm -rf .interop
    if .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .interop \
        -r tests/interop/requirements.lock; then
        echo "$wanted" >.interop/installed
    else
        echo "tests/interop: the packages of requirements.lock could not be installed; tests that need them are skipped"
    fi
fi
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTHONPATH="$PWD/.interop:$PWD" exec .venv/bin/python -m pytest --quiet --durations=5 --interop tests/interop "$@"
