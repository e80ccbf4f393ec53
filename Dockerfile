# One image for all services: `docker build -t kvroute .`, then `python -m services.<name>` or `kvroute ...`.
ARG PYTHON_IMAGE=docker.io/library/python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# The compiled index core needs a C compiler here and nowhere else.
RUN command -v gcc >/dev/null && python3 -c 'import sysconfig, os; assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' \
    || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/kvroute
WORKDIR /src
COPY requirements.lock pyproject.toml setup.py README.md LICENSE ./
COPY schemas schemas
COPY services services
COPY kvroute kvroute
ENV KVROUTE_NATIVE=required
RUN /opt/kvroute/bin/pip install --no-cache-dir -c requirements.lock .

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 kvroute && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin kvroute
COPY --from=build /opt/kvroute /opt/kvroute
ENV PATH=/opt/kvroute/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
CMD ["kvroute", "--help"]
