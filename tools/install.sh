#!/bin/sh
# Makes the virtual environment that `make demo`, `make docs` and `make test` use (extras "demo", "docs" and "dev").
#
# torch comes first: on Linux the default wheel on PyPI brings several gigabytes of CUDA libraries. Where a CPU build
# (version suffix +cpu) can be found, that one is taken; set SHARDKIT_TORCH=cuda to have the default build instead.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "shardkit needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Try: make PYTHON=python3.12" >&2
    exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
extra=${1:-dev}
case $extra in
    demo) size="about 350 MB (torch CPU ~200 MB, pyarrow, scipy, scikit-learn)" ;;
    docs) size="about 450 MB (torch CPU ~200 MB, pyarrow, scipy, moto, and what builds the site)" ;;
    *) size="about 800 MB (torch CPU ~200 MB, pyarrow, scipy, ray, and what the tests compare with: polars, duckdb, datasets)" ;;
esac
torch=$(sed -n 's/^torch==//p' constraints.txt)
echo "Setting up $VENV: $size of packages are downloaded."
if [ "${SHARDKIT_TORCH:-cpu}" = cpu ] && "$VENV/bin/pip" install -q "torch==$torch+cpu" 2>/dev/null; then
    echo "torch $torch: CPU build"
else
    echo "torch $torch: no CPU build was found by pip here; the default build follows (several GB on Linux)."
    "$VENV/bin/pip" install -q "torch==$torch"
fi
# the local version suffix of the CPU build satisfies the plain pin of constraints.txt
"$VENV/bin/pip" install -q -c constraints.txt -e ".[$extra]"
# servers that the tests of stores start, each with packages of its own; what cannot be had is skipped by its tests
[ "$extra" != dev ] || "$VENV/bin/python" tests/servers/environments.py
