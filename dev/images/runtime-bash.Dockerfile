# The Runtime Server with Bash and the two programs that most scripts call; its worker shim is inside the binary.
FROM debian:12-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends bash ca-certificates curl jq \
 && rm -rf /var/lib/apt/lists/*
COPY kruntimes-runtime-server /usr/local/bin/kruntimes-runtime-server
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/kruntimes-runtime-server", "--adapter", "bash"]
