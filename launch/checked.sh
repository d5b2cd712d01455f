# Read by the launch scripts, no script of its own: `source checked.sh LAUNCHER "$@"` checks everything first and ends
# the script if something is wrong. Then it has set what the script's command needs (hostfile, ranks, master_addr,
# master_port, interface, job, ...) and exported the ranks' variables.
#
# PYTHON  the Python of the job's environment (default: python3)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
if ! command -v "${PYTHON:-python3}" >/dev/null; then
    echo "wrong        PYTHON=${PYTHON:-python3}: there is no such program; set PYTHON to the job's own Python" >&2
    exit 2
fi
settings=$("${PYTHON:-python3}" "$here/preflight" "$@") || exit $?
eval "$settings"

run() { # become this command, or print it if this is a dry run
    if $dry_run; then
        ((${#exported[@]} == 0)) || set -- env "${exported[@]}" "$@"
        printf '%q ' "$@"
        echo
    else
        exec "$@"
    fi
}
