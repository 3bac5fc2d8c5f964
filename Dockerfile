# syntax=docker/dockerfile:1

# Three stages. `runtime`, the default, is hedgerow and nothing else; `hedgerow-init` brings the programs that set the
# rules of transparent mode. For several architectures at once each is built on its own, natively or emulated, and
# TARGETARCH, which buildx sets, picks the target:
#
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg VERSION=0.1.0 --build-arg REVISION=$(git rev-parse HEAD) .
#   docker buildx build --platform linux/amd64,linux/arm64 --target hedgerow-init .
#
# What `build` makes can also be brought along: with `--build-context build=DIR` the files of DIR/out stand in for it.

FROM rust:1.90-slim-bookworm AS build
ARG TARGETARCH
# ring and mimalloc compile C; the public roots are for the image.
RUN apt-get update \
  && apt-get install -y --no-install-recommends gcc libc6-dev ca-certificates \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY Cargo.toml Cargo.lock ./
COPY src ./src
# What `hedgerow install` prints.
COPY k8s/base ./k8s/base
# With a libc of its own, the binary needs no other file. A target is named so that build scripts keep theirs.
ENV RUSTFLAGS="-C target-feature=+crt-static" CARGO_PROFILE_RELEASE_STRIP=symbols
RUN case "${TARGETARCH:-$(dpkg --print-architecture)}" in \
    amd64) target=x86_64-unknown-linux-gnu ;; \
    arm64) target=aarch64-unknown-linux-gnu ;; \
    *) echo "no target for ${TARGETARCH}" >&2; exit 1 ;; \
  esac \
  && cargo build --release --locked --target "$target" \
  && mkdir /out \
  && cp "target/$target/release/hedgerow" /etc/ssl/certs/ca-certificates.crt /out/

# Run before the agent, as root with NET_ADMIN (and NET_RAW for iptables-legacy): `hedgerow redirect`.
FROM debian:bookworm-slim AS hedgerow-init
RUN apt-get update \
  && apt-get install -y --no-install-recommends nftables iptables \
  && rm -rf /var/lib/apt/lists/*
COPY --from=build /out/hedgerow /usr/local/bin/hedgerow
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="hedgerow-init" \
  org.opencontainers.image.description="Sets the redirect rules of hedgerow's transparent mode" \
  org.opencontainers.image.licenses="Apache-2.0 OR MIT" \
  org.opencontainers.image.version="${VERSION}" \
  org.opencontainers.image.revision="${REVISION}" \
  org.opencontainers.image.source="${SOURCE}"
USER 0:0
ENTRYPOINT ["/usr/local/bin/hedgerow"]
CMD ["redirect"]

FROM scratch AS runtime
COPY --from=build /out/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/hedgerow /usr/local/bin/hedgerow
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="hedgerow" \
  org.opencontainers.image.description="A sidecar proxy for the outbound tool calls of LLM agents" \
  org.opencontainers.image.licenses="Apache-2.0 OR MIT" \
  org.opencontainers.image.version="${VERSION}" \
  org.opencontainers.image.revision="${REVISION}" \
  org.opencontainers.image.source="${SOURCE}"
# Never root, and a uid of its own: redirect rules tell hedgerow's traffic from the agent's by it. A number, since only
# of a number it can be told that it is not root's.
USER 2747:2747
EXPOSE 15300 15301 15302
ENTRYPOINT ["/usr/local/bin/hedgerow"]
CMD ["run"]
