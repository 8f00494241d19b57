# What Dockerfile wants of PYTHON_IMAGE: Debian's Python with venv.
FROM libra-local/debian:bookworm
RUN apt-get update \
    && apt-get install -y python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
