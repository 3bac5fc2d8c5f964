#!/bin/bash
# Builds the image's `runtime` stage around a static binary and looks at what it is: its files, labels, user and size.
# Then runs it from the image's root file system, as the image's user, in a network where only a name server and a
# tool are. Takes root, for chroot and namespaces. Nothing is left behind.
#
#   tests/image/run.sh target/x86_64-unknown-linux-gnu/release/hedgerow
set -euo pipefail

binary=$(realpath "$1")
project=$(realpath "$(dirname "$0")/../..")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$project/Cargo.toml" | head -1)
most=10000000
passed=0 failed=0

work=$(mktemp -d)
buildah=(buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs)
leave() {
  "${buildah[@]}" rm --all >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap leave EXIT

check() { # what it is about, what is, what should be
  if [[ "$2" == "$3" ]]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    printf '%s\n  is     %s\n  not    %s\n' "$1" "$2" "$3"
  fi
}

# What the stage `build` would have made.
mkdir -p "$work/context/out"
cp "$binary" "$work/context/out/hedgerow"
cp /etc/ssl/certs/ca-certificates.crt "$work/context/out/"

"${buildah[@]}" build --quiet --isolation chroot --target runtime --build-context build="$work/context" \
  --build-arg TARGETARCH=any --build-arg VERSION="$version" --build-arg REVISION=0123456789abcdef --build-arg SOURCE=https://source.test/hedgerow \
  --tag hedgerow:test "$project" >/dev/null

inspect() { "${buildah[@]}" inspect --type image --format "$1" hedgerow:test; }
label() { inspect "{{index .OCIv1.Config.Labels \"org.opencontainers.image.$1\"}}"; }
check "user" "$(inspect '{{.OCIv1.Config.User}}')" "2747:2747"
check "entry point" "$(inspect '{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}')" "[/usr/local/bin/hedgerow] [run]"
check "label title" "$(label title)" "hedgerow"
check "label licenses" "$(label licenses)" "Apache-2.0 OR MIT"
check "label version" "$(label version)" "$version"
check "label revision" "$(label revision)" "0123456789abcdef"
check "label source" "$(label source)" "https://source.test/hedgerow"
check "label description" "$([[ -n $(label description) ]] && echo told)" "told"

"${buildah[@]}" push --quiet hedgerow:test "oci:$work/oci:test"
layers=$(python3 - "$work/oci" <<'END'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
blob = lambda it: json.loads((folder / "blobs" / it["digest"].replace(":", "/")).read_text())
manifest = blob(json.loads((folder / "index.json").read_text())["manifests"][0])
layers = manifest["layers"]
assert all(layer["mediaType"].endswith("gzip") for layer in layers), layers
print(sum(layer["size"] for layer in layers))
END
)
check "compressed size of $layers bytes" "$((layers < most))" 1

container=$("${buildah[@]}" from hedgerow:test)
cp -a "$("${buildah[@]}" mount "$container")" "$work/root"
# No shell, no libc, nothing else at all.
check "files" "$(cd "$work/root" && find . ! -type d | sort | tr '\n' ' ')" \
  "./etc/ssl/certs/ca-certificates.crt ./usr/local/bin/hedgerow "

inside=("$(command -v chroot)" --userspec=2747:2747 "$work/root" /usr/local/bin/hedgerow)
check "version" "$("${inside[@]}" --version)" "hedgerow $version"

# What every container has beside its image, by the runtime specification and by the kubelet.
mkdir -p "$work/root/etc/hedgerow" "$work/root/proc" "$work/root/dev"
touch "$work/root/dev/random" "$work/root/dev/urandom"
echo "nameserver 127.0.0.1" >"$work/root/etc/resolv.conf"
echo "defaults: { hedge: off }" >"$work/root/etc/hedgerow/policy.yaml"

cat >"$work/serve.py" <<'END'
"""A name server and a tool, and the image's hedgerow between them and a client."""

import asyncio
import subprocess
import sys
import time

sys.path.append(sys.argv[1])
from harness.dns import NameServer
from harness.process import Process


async def tool(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nserved")
    await writer.drain()
    writer.close()


async def main():
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 53))
    await asyncio.start_server(tool, "127.0.0.1", 80)
    command = [*sys.argv[2:], "run", "--config", "/etc/hedgerow/policy.yaml"]
    hedgerow = subprocess.Popen(command, env={}, stdout=subprocess.DEVNULL)
    try:
        print(await asyncio.to_thread(ask, hedgerow))
    finally:
        hedgerow.terminate()
        print("left with", await asyncio.to_thread(hedgerow.wait, 30))


def ask(hedgerow):
    until = time.monotonic() + 15
    while hedgerow.poll() is None and time.monotonic() < until:
        try:
            if Process.ask(15302, "/readyz")[0] == 200:
                break
        except OSError:
            time.sleep(0.02)
    status, body = Process.ask(15300, "http://tool.test/")
    return status, body.decode()


asyncio.run(main())
END
served=$(unshare --net --mount bash -c '
  ip link set lo up
  mount -t proc none "$1/proc"
  for device in random urandom; do mount --bind /dev/$device "$1/dev/$device"; done
  shift
  exec "$@"' _ "$work/root" python3 "$work/serve.py" "$project/tests/clients" "${inside[@]}") || true
check "answer by name, and end" "$served" "(200, 'served')
left with 0"

verdict=ok
((failed == 0)) || verdict=FAILED
echo "test result: $verdict. $passed passed; $failed failed; 0 ignored; $layers bytes compressed"
((failed == 0))
