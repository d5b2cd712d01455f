# Read by the launch scripts, no script of its own: `source checked.sh LAUNCHER "$@"` checks everything first and ends
# the script if something is wrong. Then it has set what the script's command needs (hostfile, ranks, master_addr,
# master_port, interface, job, ...) and exported the ranks' variables.
#
# PYTHON  the Python of the job's environment (default: python3)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
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
