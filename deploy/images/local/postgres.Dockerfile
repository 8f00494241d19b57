# Debian's Postgres behind the interface of the official image, as far as Libra uses it; see postgres-entrypoint.sh.
FROM libra-local/debian:bookworm
# the package would make a cluster of its own, which nobody needs
RUN mkdir /etc/postgresql-common \
    && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf \
    && apt-get update \
    && apt-get install -y postgresql-15 dumb-init \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && install -d -o postgres -g postgres -m 0700 /var/lib/postgresql/data \
    && install -d -o postgres -g postgres -m 2775 /run/postgresql
COPY postgres-entrypoint.sh /usr/local/bin/postgres-entrypoint
ENV PATH=/usr/lib/postgresql/15/bin:$PATH PGDATA=/var/lib/postgresql/data
# SIGTERM is made the same as SIGINT, a fast shutdown: Postgres itself would wait for its clients to leave
ENTRYPOINT ["/usr/bin/dumb-init", "--single-child", "--rewrite", "15:2", "--", "bash", "/usr/local/bin/postgres-entrypoint"]
CMD ["postgres"]
EXPOSE 5432
