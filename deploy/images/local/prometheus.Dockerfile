# Debian's Prometheus behind the command line of prom/prometheus. Debian leaves the web page out; the API is whole.
FROM libra-local/debian:bookworm AS package
RUN apt-get update && apt-get install -y prometheus

# without the scripts of the console templates, which are two thirds of what the package brings
FROM libra-local/debian:bookworm
COPY --from=package /usr/bin/prometheus /usr/bin/promtool /usr/bin/
COPY --from=package /etc/prometheus/prometheus.yml /etc/prometheus/prometheus.yml
RUN install -d -o nobody -g nogroup /prometheus
USER nobody
WORKDIR /prometheus
EXPOSE 9090
ENTRYPOINT ["/usr/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
