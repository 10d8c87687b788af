# Stands in for grafana/k6 where no registry is reached: the load generator for a Job in the cluster.
FROM debian:12-slim
COPY k6 /usr/local/bin/k6
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/k6"]
