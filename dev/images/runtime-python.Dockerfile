# The Runtime Server with a Python interpreter; its worker shim is inside the binary.
FROM debian:12-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*
COPY kruntimes-runtime-server /usr/local/bin/kruntimes-runtime-server
ENV PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/kruntimes-runtime-server", "--adapter", "python"]
