# syntax=docker/dockerfile:1

FROM rust:1.90-slim-bookworm AS build
# ring and mimalloc compile C.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY Cargo.toml Cargo.lock ./
COPY src ./src
RUN cargo build --release --locked

FROM debian:bookworm-slim
# The public roots; hedgerow brings its own where these are missing.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /build/target/release/hedgerow /usr/local/bin/hedgerow
# Never root, and a uid of its own: redirect rules tell hedgerow's traffic from the agent's by it.
USER 2747:2747
EXPOSE 15300 15301 15302
ENTRYPOINT ["/usr/local/bin/hedgerow"]
CMD ["run"]
