#!/bin/sh
# The browser tests need Chromium: installed through apt where it is missing and we are root, else a clear message.
# Arguments are those of pytest: with browser tests deselected nothing is needed.
case "$*" in
    *"not browser"* | *"not (browser"*) exit 0 ;;
esac
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing chromium for the browser tests"
    apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium >/dev/null && exit 0
fi
echo "The browser tests need Chromium: install it (Debian: apt-get install chromium), or run" >&2
echo "  make test ARGS='-m \"not browser\"'" >&2
exit 1
