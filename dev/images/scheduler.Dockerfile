# The binary is prebuilt: a cargo stage here would compile everything anew each time.
FROM debian:12-slim
COPY kruntimes-scheduler /usr/local/bin/kruntimes-scheduler
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/kruntimes-scheduler"]
