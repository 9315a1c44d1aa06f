#!/bin/sh
# The loader's compiled module with AddressSanitizer and UndefinedBehaviorSanitizer, under its property tests.
# Whatever they find ends the process: `make sanitize` then fails.
set -eu
cd "$(dirname "$0")/.."
python="${BIN:-.venv/bin}/python"
compiler="${CC:-cc}"
if ! command -v "$compiler" >/dev/null; then
    echo "sanitize: there is no C compiler; set CC"
    exit 1
fi
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
module="shardkit/loader/block_rows$suffix"
plain=$(mktemp -d)
[ ! -e "$module" ] || cp -p "$module" "$plain/module"
restore() {
    rm -f "$module"
    [ ! -e "$plain/module" ] || mv "$plain/module" "$module"
    rm -rf "$plain"
}
trap restore EXIT
trap 'exit 130' INT TERM
compile() { # -fsanitize=…
    "$compiler" -shared -fPIC -g -O1 "$@" -fno-omit-frame-pointer -I"$include" shardkit/loader/block_rows.c -o "$module.new"
    mv "$module.new" "$module"
}
library() { "$compiler" -print-file-name="$1"; }

# of the C library's own functions too: a copy past the end of a buffer is one of memcpy's
compile -fsanitize=address,undefined -fno-sanitize-recover=all
# Python's allocator hides its objects from the sanitizer: every one from malloc. It never frees all of them: no leaks told.
LD_PRELOAD="$(library libasan.so)" PYTHONMALLOC=malloc \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    "$python" -m pytest -q -n 0 -p no:cacheprovider tests/property/test_compiled_modules.py \
    tests/property/test_gather.py tests/property/test_block_placing.py \
    tests/unit/test_load_queue.py tests/unit/test_block_window.py "$@"
