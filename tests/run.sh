#!/usr/bin/env bash
# Run the tests, making the environment first where it is missing. Arguments go to pytest:
#   bash tests/run.sh                     the default suite
#   bash tests/run.sh --full              everything
#   bash tests/run.sh tests/recompute -x  one room, stop at the first failure
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/venv.sh
. tools/venv.sh
ensure_venv
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
exec .venv/bin/python -m pytest --quiet --durations=10 "$@"
