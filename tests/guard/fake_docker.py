"""A stand-in for docker's command line and daemon, which really runs containers as local processes.

    fake_docker.py STATE_FOLDER ARGUMENTS...

Bind mounts are emulated by their sources: an argument that names a mount's target becomes its source. Where cgroup v2
can be written, each container gets a group of its own, named as docker names it. A first process that ends takes the
others along, as the kernel does in a pid namespace.

Faults, by files in the folder, named ``fault.VERB`` and holding one word:
    hang    never answer (and do nothing)          hang-after  do the work, then never answer
    fail    fail at once                           die-after   do the work, then die by SIGKILL
    refuse  (rm) say no; (kill) deny permission    slow        answer after 0.4 s
    bare    (start) run the command without our entry point    elsewhere  (start) mount another file as the lock
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time

STATE = sys.argv[1]
LOCK_TARGET = "/run/thor-spec/residency"
CGROUPS = "/sys/fs/cgroup/unified" if os.path.isdir("/sys/fs/cgroup/unified") else "/sys/fs/cgroup"
WITH_VALUE = {
    "--pull", "--name", "--network", "--ipc", "--shm-size", "--runtime", "--group-add", "--workdir", "--label", "--env",
    "--mount", "--entrypoint",
}  # fmt: skip


def path(container: str) -> str:
    return f"{STATE}/{container}.json"


def text(file_path: str) -> str:
    with open(file_path) as file:
        return file.read()


def load(container: str) -> dict:
    for name in sorted(os.listdir(STATE)):
        if name.endswith(".json") and name.startswith(container):
            with open(f"{STATE}/{name}") as file:
                return json.load(file)
    sys.exit(f"Error response from daemon: No such container: {container}")


def save(container: dict) -> None:
    temporary = f"{STATE}/{container['Id']}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump(container, file)
    os.replace(temporary, path(container["Id"]))


def every() -> list[dict]:
    return [load(name[:-5]) for name in sorted(os.listdir(STATE)) if name.endswith(".json")]


def create(arguments: list[str]) -> None:
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        if arguments[0] not in WITH_VALUE:
            sys.exit(f"unknown flag: {arguments[0]}")
        options.setdefault(arguments[0], []).append(arguments[1])
        arguments = arguments[2:]
    image, *command = arguments
    container = secrets.token_hex(32)
    labels = dict(label.split("=", 1) for label in options.get("--label", []))
    save(
        {
            "Id": container,
            "Name": f"/{options['--name'][0]}",
            "State": {"Status": "created", "Pid": 0, "ExitCode": 0},
            "Config": {"Image": image, "Labels": labels},
            "command": [*options.get("--entrypoint", []), *command],
            "mounts": [
                dict(part.partition("=")[::2] for part in mount.split(",")) for mount in options.get("--mount", [])
            ],
            "env": options.get("--env", []),
            "cgroup": "",
        }
    )
    print(container)


def start(container: str, fault: str) -> None:
    ready, tell = os.pipe()
    if os.fork() == 0:
        # The daemon's side: outlives the client, and takes no part in its session.
        os.setsid()
        with open("/proc/self/comm", "w") as file:
            file.write("daemon")
        os.close(ready)
        supervise(load(container), tell, fault)
        os._exit(0)
    os.close(tell)
    if (answer := os.read(ready, 4096)) != b"ok":
        sys.exit(f"Error response from daemon: {answer.decode()}")
    print(container)


def supervise(container: dict, tell: int, fault: str) -> None:
    sources = {mount["target"]: mount["source"] for mount in container["mounts"]}
    if fault == "elsewhere":
        sources[LOCK_TARGET] = f"{STATE}/another-lock"
        open(sources[LOCK_TARGET], "w").close()
    command = [sources.get(part, part) for part in container["command"]]
    if fault == "bare":
        command = command[command.index("--") + 1 :]
    try:
        cgroup = f"{CGROUPS}/docker-{container['Id']}.scope"
        os.mkdir(cgroup)
        container["cgroup"] = cgroup
    except OSError:
        cgroup = ""

    def enter() -> None:
        if cgroup:
            with open(f"{cgroup}/cgroup.procs", "w") as file:
                file.write("0")

    environment = {"PATH": os.environ["PATH"], **dict(item.split("=", 1) for item in container["env"])}
    with open(f"{STATE}/{container['Id']}.log", "ab") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=enter,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.write(tell, f"exec: {command[0]!r}: {error.strerror}".encode())
            if cgroup:
                os.rmdir(cgroup)
            return
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    container["State"] = {"Status": "running", "Pid": process.pid, "ExitCode": 0}
    save(container)
    os.write(tell, b"ok")
    os.close(tell)
    code = process.wait()
    end_all(container, process.pid)
    if cgroup:
        while "populated 1" in text(f"{cgroup}/cgroup.events"):
            time.sleep(0.005)
        os.rmdir(cgroup)
    container["State"] = {"Status": "exited", "Pid": 0, "ExitCode": code if code >= 0 else 128 - code}
    if os.path.exists(path(container["Id"])):
        save(container)


def end_all(container: dict, first: int) -> None:
    if container["cgroup"]:
        with open(f"{container['cgroup']}/cgroup.kill", "w") as file:
            file.write("1")
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first, signal.SIGKILL)


def kill(container: dict, name: str) -> None:
    if container["State"]["Status"] != "running":
        sys.exit(f"Error response from daemon: container {container['Id']} is not running")
    with contextlib.suppress(ProcessLookupError):
        os.kill(container["State"]["Pid"], getattr(signal, f"SIG{name}"))


def remove(container: dict) -> None:
    if container["State"]["Status"] == "running":
        kill(container, "KILL")
        while load(container["Id"])["State"]["Status"] == "running":
            time.sleep(0.005)
    os.unlink(path(container["Id"]))


def logs(arguments: list[str]) -> None:
    container = arguments[-1]
    with open(f"{STATE}/{container}.log", "rb") as log:
        if "--since" in arguments:
            log.seek(0, os.SEEK_END)
        while True:
            ended = load(container)["State"]["Status"] == "exited"
            os.write(1, log.read())
            if ended:
                return
            time.sleep(0.02)


def main() -> None:
    verb, *arguments = sys.argv[2:]
    with open(f"{STATE}/calls", "a") as file:
        file.write(json.dumps([verb, *arguments]) + "\n")
    try:
        with open(f"{STATE}/fault.{verb}") as file:
            fault = file.read().strip()
    except OSError:
        fault = ""
    if fault == "hang":
        signal.pause()
    if fault == "fail":
        sys.exit(f"Error response from daemon: {verb} failed as told")
    if fault == "slow":
        time.sleep(0.4)
    if verb == "create":
        create(arguments)
    elif verb == "start":
        start(load(arguments[0])["Id"], fault)
    elif verb == "ps":
        wanted = arguments[arguments.index("--filter") + 1].removeprefix("label=")
        print("\n".join(found["Id"] for found in every() if wanted in found["Config"]["Labels"]))
    elif verb == "inspect":
        found, missing = [], ""
        for name in arguments[2:]:
            try:
                found.append(load(name))
            except SystemExit:
                missing = name
        print(json.dumps(found))
        if missing:
            sys.exit(f"Error: No such container: {missing}")
    elif verb == "image":
        if os.path.exists(f"{STATE}/no-image"):
            sys.exit(f"Error: No such image: {arguments[1]}")
    elif verb == "kill":
        if fault == "refuse":
            sys.exit("Error response from daemon: permission denied")
        kill(load(arguments[-1]), arguments[1])
    elif verb == "rm":
        if fault == "refuse":
            sys.exit("Error response from daemon: cannot remove container: driver failed")
        remove(load(arguments[-1]))
    elif verb == "logs":
        logs(arguments)
    else:
        sys.exit(f"unknown command: {verb}")
    sys.stdout.flush()
    if fault == "hang-after":
        signal.pause()
    if fault == "die-after":
        # Half-way: the daemon has done its part, and nobody is told.
        os.ftruncate(1, 0)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
