#!/usr/bin/env bash
# Put the packages of other projects that tests/interop compares with into .interop, apart from .venv: no dependency of
# theirs may change ours. The tests find them there, and skip with this script's name where they are not.
set -euo pipefail
cd "$(dirname "$0")/../.."
wanted="megatron-core==0.16.1"
if [ "$(cat .interop/installed 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf .interop
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .interop "$wanted"
echo "$wanted" >.interop/installed
