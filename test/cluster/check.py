#!/usr/bin/env python3
"""Checks the cluster that is up. What fails is printed, and all results are kept in $CLUSTER_DIR/results.

usage: check.py LABEL [GROUP...]   the groups of checks, as GROUPS has them below; without any, those of the network
       check.py table              the results, by group and label
"""
import collections, glob, json, os, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
DIR = os.environ.get("CLUSTER_DIR") or os.path.join(HERE, "../../.cache/cluster")
NODES = ["n1", "n2", "n3"]
NODE_IP = {f"n{i}": {4: f"192.0.2.1{i}", 6: f"2001:db8:1::1{i}"} for i in (1, 2, 3)}
OUTSIDE = {4: "192.0.2.100", 6: "2001:db8:1::100"}
FAMILIES = (4, 6)
AGNHOST = {"name": "c", "image": "registry.k8s.io/e2e-test-images/agnhost:2.56", "args": ["netexec", "--udp-port=8081"],
           "readinessProbe": {"httpGet": {"path": "/hostname", "port": 8080}, "periodSeconds": 1}}
results = []  # of the group at work: (passed, name)


def run(*command, timeout=120, **more):
    """The command's standard output; what it says otherwise is in it if it fails."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=timeout, **more)
    except subprocess.TimeoutExpired:
        return f"no end in {timeout} s"
    return (done.stdout if done.returncode == 0 else f"exit {done.returncode}: {done.stdout}{done.stderr}").strip()


def kubectl(*arguments, **more):
    return run(HERE + "/kubectl", *arguments, **more)


def on(node):
    """Runs commands on a node, or outside."""
    if node == "outside":
        return lambda *command, **more: run("ip", "netns", "exec", "tcluster-outside", *command, **more)
    return lambda *command, **more: run("nsenter", "-t", open(f"{DIR}/run/{node}.pid").read().strip(), "-a", *command, **more)


class Pod:
    def __init__(self, pod):
        self.name, self.node = pod["metadata"]["name"], pod["spec"]["nodeName"]
        self.ip = {6 if ":" in a["ip"] else 4: a["ip"] for a in pod["status"]["podIPs"]}
        hierarchy = next(h for h in open(f"{DIR}/run/hierarchies").read().split() if h.startswith("pids"))
        container = pod["status"]["containerStatuses"][0]["containerID"].split("//")[1]
        groups = f"/sys/fs/cgroup/{hierarchy}/tombolo-cluster/{self.node}/kubepods/**/{container}/cgroup.procs"
        self.pid = open(glob.glob(groups, recursive=True)[0]).read().split()[0]

    def __call__(self, *command, inside=(), **more):
        """Runs a command in its network namespace; with inside=["-m"] the image's own."""
        return run("nsenter", "-t", self.pid, "-n", *inside, "--", *command, **more)


def pods(app):
    items = json.loads(kubectl("-n", "t", "get", "pods", "-l", "app=" + app, "-o", "json"))["items"]
    return sorted((Pod(p) for p in items if "deletionTimestamp" not in p["metadata"]), key=lambda p: p.node)


def pod(app):
    return pods(app)[0]


def url(address, port, path, scheme="http"):
    return f"{scheme}://" + (f"[{address}]" if ":" in address else address) + f":{port}/{path}"


def get(where, address, port, path="hostname", seconds=5):
    return where("curl", "-gsS", "-m", str(seconds), url(address, port, path))


def source(where, address, port):
    """Whose address the server sees."""
    return get(where, address, port, "clientip").rsplit(":", 1)[0].strip("[]").replace("::ffff:", "")


def udp(where, address, port):
    return where("timeout", "3", "bash", "-c", f"exec 3<>/dev/udp/{address}/{port}; echo hostname >&3; dd bs=200 count=1 <&3 2>/dev/null")


def cluster_ip(service):
    ips = json.loads(kubectl("-n", "t", "get", "service", service, "-o", "json"))["spec"]["clusterIPs"]
    return {6 if ":" in ip else 4: ip for ip in ips}


def equal(name, got, want):
    holds(name, got == want, f"got {got!r}, want {want!r}")


def holds(name, true, why=""):
    results.append((bool(true), name))
    if not true:
        print(f"FAIL {name}: {why[:600]}", flush=True)


def soon(name, look, seconds=60):
    """Waits until look says nothing, which is what is wrong."""
    end = time.monotonic() + seconds
    while (wrong := look()) and time.monotonic() < end:
        time.sleep(0.5)
    holds(name, not wrong, str(wrong))


def differs(look, want):
    return lambda: None if (got := look()) == want else f"got {got!r}, want {want!r}"


# ---- what is looked at ----

def workload(kind, name, containers, pod=None, spec=None, annotations=None):
    one = {"terminationGracePeriodSeconds": 1, "containers": containers, **(pod or {})}
    meta = {"labels": {"app": name}, "annotations": annotations or {}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": "t"},
            "spec": {"selector": {"matchLabels": {"app": name}}, "template": {"metadata": meta, "spec": one}, **(spec or {})}}


def service(name, app, node_port=0, **spec):
    ports = [{"name": "http", "port": 80, "targetPort": 8080}, {"name": "udp", "port": 81, "targetPort": 8081, "protocol": "UDP"}]
    for i, port in enumerate(ports if node_port else []):
        port["nodePort"] = node_port + i
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "t"},
            "spec": {"ipFamilyPolicy": "PreferDualStack", "selector": {"app": app}, "ports": ports, **spec}}


def apply():
    published = AGNHOST | {"ports": [{"containerPort": 8080, "hostPort": 8088}, {"containerPort": 8081, "hostPort": 8089, "protocol": "UDP"},
                                     {"containerPort": 8080, "hostPort": 8090, "hostIP": NODE_IP["n2"][4]}]}
    limits = {"kubernetes.io/ingress-bandwidth": "20M", "kubernetes.io/egress-bandwidth": "10M"}
    spread = [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "web"}}}]
    many = {"replicas": 0, "strategy": {"rollingUpdate": {"maxSurge": 15, "maxUnavailable": 15}}}
    items = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "t"}},
        workload("Deployment", "web", [AGNHOST], {"topologySpreadConstraints": spread}, {"replicas": 6}),
        workload("Deployment", "solo", [AGNHOST], {"nodeName": "n1"}),
        workload("Deployment", "many", [{"name": "c", "image": "registry.k8s.io/pause:3.10.1"}], spec=many),
        workload("DaemonSet", "client", [AGNHOST]),
        workload("DaemonSet", "published", [published], {"nodeSelector": {"kubernetes.io/hostname": "n2"}}),
        workload("Deployment", "limited", [AGNHOST], {"nodeName": "n3"}, annotations=limits),
        service("web", "web"), service("solo", "solo"), service("head", "web", clusterIP="None"),
        service("sticky", "web", sessionAffinity="ClientIP"), service("local", "client", internalTrafficPolicy="Local"),
        service("ports", "solo", 30080, type="NodePort"),
        service("ports-local", "solo", 30090, type="NodePort", externalTrafficPolicy="Local"),
        service("external", "web", externalIPs=["192.0.2.200"]),
    ]
    print(kubectl("apply", "-f", "-", input="\n---\n".join(json.dumps(i) for i in items)).count("created"), "objects created")
    settle()


def settle():
    for what in ("deployment/web", "deployment/solo", "deployment/limited", "deployment/many", "daemonset/client", "daemonset/published"):
        told = kubectl("-n", "t", "rollout", "status", what, "--timeout=120s", timeout=150)
        holds("rollout of " + what, "successfully" in told, told)


# ---- groups ----

def pod_to_pod():
    for a in pods("client"):
        for b in pods("client"):
            for f in FAMILIES:
                equal(f"pod {a.node} to pod {b.node}, IPv{f}: source", source(a, b.ip[f], 8080), a.ip[f])
                equal(f"node {a.node} to pod {b.node}, IPv{f}", get(on(a.node), b.ip[f], 8080), b.name)
                equal(f"pod {a.node} to node {b.node}, IPv{f}", a("curl", "-gsSkm5", url(NODE_IP[b.node][f], 10250, "healthz", "https")), "ok")


def cluster_ips():
    solo, solo_ip, web_ip, webs = pod("solo"), cluster_ip("solo"), cluster_ip("web"), {p.name for p in pods("web")}
    for a in pods("client"):
        for f in FAMILIES:
            seen = [get(a, web_ip[f], 80) for _ in range(30)]
            holds(f"30 requests from {a.node}, IPv{f}", set(seen) <= webs and len(set(seen)) > 1, str(seen))
            holds(f"UDP from {a.node}, IPv{f}", (got := udp(a, web_ip[f], 81)) in webs, got)
            equal(f"source of {a.node}, IPv{f}", source(a, solo_ip[f], 80), a.ip[f])
            equal(f"node {a.node}, IPv{f}", get(on(a.node), solo_ip[f], 80), solo.name)
    a = pods("client")[1]
    equal("session affinity", len({get(a, cluster_ip("sticky")[4], 80) for _ in range(8)}), 1)
    for a in pods("client"):
        equal(f"internalTrafficPolicy Local, {a.node}", get(a, cluster_ip("local")[4], 80), a.name)
    on("outside")("ip", "route", "replace", "192.0.2.200/32", "via", NODE_IP["n2"][4])
    holds("external IP", (got := get(on("outside"), "192.0.2.200", 80)) in webs, got)


def hairpin():
    solo, ip = pod("solo"), cluster_ip("solo")
    for f in FAMILIES:
        equal(f"TCP, IPv{f}", get(solo, ip[f], 80), solo.name)
        equal(f"UDP, IPv{f}", udp(solo, ip[f], 81), solo.name)
        for port in (30080, 30090):
            equal(f"by node port {port}, IPv{f}", get(solo, NODE_IP["n1"][f], port), solo.name)


def node_ports():
    solo, client, out = pod("solo"), pods("client")[1], on("outside")
    for n in NODES:
        for f in FAMILIES:
            ip = NODE_IP[n][f]
            equal(f"outside to {n}, Cluster, IPv{f}", get(out, ip, 30080), solo.name)
            equal(f"outside to {n}, Cluster, UDP, IPv{f}", udp(out, ip, 30081), solo.name)
            equal(f"pod to {n}, IPv{f}", get(client, ip, 30080), solo.name)
            equal(f"{n} to itself, IPv{f}", get(on(n), ip, 30080), solo.name)
            if n == solo.node:
                equal(f"outside to {n}, Local: source, IPv{f}", source(out, ip, 30090), OUTSIDE[f])
                equal(f"outside to {n}, Local, UDP, IPv{f}", udp(out, ip, 30091), solo.name)
            else:
                holds(f"outside to {n}, Local, no endpoint, IPv{f}", (got := get(out, ip, 30090, seconds=1)).startswith("exit"), got)


def host_ports():
    p, out = pod("published"), on("outside")
    for f in FAMILIES:
        ip = NODE_IP["n2"][f]
        equal(f"outside: source, IPv{f}", source(out, ip, 8088), OUTSIDE[f])
        equal(f"outside, UDP, IPv{f}", udp(out, ip, 8089), p.name)
        for n in NODES:
            equal(f"node {n}, IPv{f}", get(on(n), ip, 8088), p.name)
        for a in pods("client"):
            equal(f"pod {a.node}, IPv{f}", get(a, ip, 8088), p.name)
        equal(f"the pod itself, IPv{f}", get(p, ip, 8088), p.name)
    equal("127.0.0.1", get(on("n2"), "127.0.0.1", 8088), p.name)
    equal("hostIP", get(out, NODE_IP["n2"][4], 8090), p.name)
    holds("not at 127.0.0.1 with a hostIP", get(on("n2"), "127.0.0.1", 8090).startswith("exit"))


def dns():
    for a in pods("client"):
        ask = lambda *q: a("dig", "+short", *q, inside=["-m"])
        equal(f"A from {a.node}", ask("solo.t.svc.cluster.local", "A"), cluster_ip("solo")[4])
        equal(f"AAAA by TCP from {a.node}", ask("+tcp", "solo.t.svc.cluster.local", "AAAA"), cluster_ip("solo")[6])
        equal(f"headless from {a.node}", len(ask("head.t.svc.cluster.local", "A", "head.t.svc.cluster.local", "AAAA").split()), 12)
        got = a("curl", "-sSkm5", "https://kubernetes.default.svc.cluster.local/version", inside=["-m"])
        holds(f"API server from {a.node}", "gitVersion" in got, got)


def masquerade():
    for a in pods("client"):
        for f in FAMILIES:
            equal(f"pod {a.node} outside, IPv{f}", source(a, OUTSIDE[f], 9999), NODE_IP[a.node][f])


def bandwidth():
    """The receiver measures, in the last of five seconds."""
    limited, client = pod("limited"), pods("client")[0]
    for name, sender, receiver, mbit in (("to the pod", client, limited, 20), ("from the pod", limited, client, 10)):
        server = subprocess.Popen(["nsenter", "-t", sender.pid, "-n", "iperf3", "-s", "-1", "-p", "5201"], stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        told = receiver("iperf3", "-c", sender.ip[4], "-p", "5201", "-R", "-t", "5", "-J")
        server.kill()
        got = told.startswith("{") and json.loads(told)["intervals"][-1]["sum"]["bits_per_second"] / 1e6
        holds(f"{name}: {mbit} Mbit/s", got and 0.8 * mbit < got < 1.1 * mbit, f"measured {got or told} Mbit/s")
        print(f"{name}: {got:.1f} of {mbit} Mbit/s")


def keeper(node):
    return kubectl("-n", "kube-system", "get", "pods", "-l", "app=tombolo", "--field-selector", "spec.nodeName=" + node, "-o", "name")


def in_keeper(node, *command):
    return kubectl("-n", "kube-system", "exec", keeper(node), "-c", "tombolod", "--", *command)


def tombolo():
    """Nothing differs, nothing is left of pods that are gone, and the keepers warned of nothing."""
    for n in NODES:
        soon(f"tombolo check on {n}", lambda: (told := in_keeper(n, "tombolo", "check")).startswith("exit") and told, 15)
        soon(f"as many ports and addresses as pods on {n}", lambda: leftovers(n), 60)
        log = kubectl("-n", "kube-system", "logs", keeper(n), "-c", "tombolod")
        warnings = [line for line in log.splitlines() if "level=INFO" not in line]
        holds(f"log of tombolod on {n}", log and not warnings, "\n".join(warnings))


def leftovers(node):
    items = json.loads(kubectl("get", "pods", "-A", "--field-selector", "spec.nodeName=" + node, "-o", "json"))["items"]
    want = sum(not p["spec"].get("hostNetwork") for p in items)
    ports = len(json.loads(on(node)("ip", "-j", "link", "show", "master", "cbr0", "type", "veth")))
    addresses = len(glob.glob(f"{DIR}/nodes/{node}/own/var/lib/cni/networks/pods/*[0-9a-f][.:]*"))
    return None if (want, 2 * want) == (ports, addresses) else f"{want} pods, {ports} ports, {addresses} addresses"


# ---- what happens to nodes ----

def node_script(*arguments):
    told = run(HERE + "/node.sh", *arguments)
    holds("node.sh " + " ".join(arguments), not told.startswith("exit"), told)


def scale(count, restart=False):
    kubectl("-n", "t", "scale", "deployment/many", f"--replicas={count}")
    if restart:
        kubectl("-n", "t", "rollout", "restart", "deployment/many")
    told = kubectl("-n", "t", "rollout", "status", "deployment/many", "--timeout=240s", timeout=250)
    holds(f"{count} pods", "successfully" in told, told)


def forward_drop():
    a, b, c = pods("client")
    for tables in ("iptables", "ip6tables"):
        on("n2")(tables, "-P", "FORWARD", "DROP")
    for f in FAMILIES:
        soon(f"a pod goes outside, IPv{f}", differs(lambda: source(b, OUTSIDE[f], 9999), NODE_IP["n2"][f]))
        soon(f"a pod reaches another node's, IPv{f}", differs(lambda: get(b, c.ip[f], 8080), c.name))
        soon(f"a host port is reached, IPv{f}", differs(lambda: get(on("outside"), NODE_IP["n2"][f], 8088), pod("published").name))
    for tables, cidr in (("iptables", "10.244.0.0/16"), ("ip6tables", "fd24::/48")):  # as docs/cluster.md says
        on("n2")(tables, "-A", "FORWARD", "-s", cidr, "-o", "cbr0", "-j", "ACCEPT")
    for f in FAMILIES:
        soon(f"other nodes' pods reach one, IPv{f}", differs(lambda: get(a, b.ip[f], 8080), b.name))
    for tables, cidr in (("iptables", "10.244.0.0/16"), ("ip6tables", "fd24::/48")):
        on("n2")(tables, "-D", "FORWARD", "-s", cidr, "-o", "cbr0", "-j", "ACCEPT")
        on("n2")(tables, "-P", "FORWARD", "ACCEPT")


def kubelet_killed():
    a, b, _ = pods("client")
    node_script("kill", "2", "kubelet")
    equal("pods go on", get(a, b.ip[4], 8080), b.name)
    node_script("start", "2", "kubelet")
    kubectl("-n", "t", "delete", "pod", b.name)
    settle()
    pod_to_pod()


def containerd_killed():
    kubectl("-n", "t", "scale", "deployment/many", "--replicas=20")
    time.sleep(2)
    node_script("kill", "2", "containerd")
    a, b = [p for p in pods("client") if p.node != "n3"]
    equal("pods go on", get(a, b.ip[4], 8080), b.name)
    node_script("start", "2", "containerd")
    scale(20)
    scale(0)
    pod_to_pod()


def power_cut(node="n2"):
    before = pods("client")
    node_script("cut", node[1])
    a, b = [p for p in before if p.node != node]
    equal("the other nodes' pods go on", get(a, b.ip[4], 8080), b.name)
    node_script("boot", node[1])
    gone = {p.name: p.pid for p in before}
    soon("its pods run again", lambda: [p for p in fresh() if p.node == node and p.pid == gone.get(p.name)], 90)
    settle()
    kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=60s")


def fresh():
    try:
        return pods("client")
    except (IndexError, KeyError):
        return before_boot


def churn():
    scale(60)
    scale(60, restart=True)
    scale(0)


def not_ready(node):
    items = json.loads(kubectl("get", "node", node, "-o", "json"))["status"]["conditions"]
    return next((c["message"] for c in items if c["type"] == "Ready" and c["status"] != "True"), "")


def status():
    """containerd 2.1 and later ask the plugin whether it could add a pod."""
    on("n3")("nft", "add table inet breaker; add chain inet breaker f { type filter hook forward priority 300; policy drop; }")
    soon("the node's condition names what drops all", lambda: None if "breaker" in (got := not_ready("n3")) else got or "Ready")
    print("STATUS:", not_ready("n3"))
    on("n3")("nft", "delete table inet breaker")
    soon("the node is ready again", lambda: not_ready("n3"))


def two_versions():
    """n3 boots with the other version."""
    on("n3")("ctr", "-n", "k8s.io", "images", "import", DIR + "/images/other/tombolo.tar")
    on("n3")("rm", "-f", "/opt/cni/bin/tombolo")
    power_cut("n3")
    digest = {n: on(n)("sha256sum", "/opt/cni/bin/tombolo") for n in NODES}
    holds("n3 has another version", digest["n3"] != digest["n2"] == digest["n1"], str(digest))
    for group in (pod_to_pod, cluster_ips, hairpin, dns, masquerade, bandwidth):
        group()


NETWORK = {"pods and nodes": pod_to_pod, "Services": cluster_ips, "hairpin": hairpin, "NodePorts": node_ports,
           "host ports": host_ports, "DNS, API server": dns, "masquerade": masquerade, "bandwidth": bandwidth,
           "FORWARD DROP": forward_drop, "nothing left, no warning": tombolo}
GROUPS = NETWORK | {"kubelet killed": kubelet_killed, "containerd killed": containerd_killed, "60 pods' churn": churn,
                    "power cut": power_cut, "STATUS": status, "two versions": two_versions}


def table():
    cells, labels = collections.defaultdict(lambda: [0, 0]), []
    for line in open(DIR + "/results"):
        label, group, passed, _ = line.rstrip("\n").split("\t")
        labels += [label] if label not in labels else []
        cells[group, label][passed != "pass"] += 1
    print("| |", " | ".join(labels), "|\n|---|" + "---|" * len(labels))
    for group in ["rollout", *GROUPS]:
        row = [cells.get((group, label)) for label in labels]
        print(f"| {group} |", " | ".join(f"{r[0]}" + (f", **{r[1]} failed**" if r[1] else "") if r else "" for r in row), "|")


def main():
    if sys.argv[1:] == ["table"]:
        return table()
    label, failed = sys.argv[1], 0
    for group, check in {"rollout": apply, **({g: GROUPS[g] for g in sys.argv[2:]} or NETWORK)}.items():
        results.clear()
        begin = time.monotonic()
        try:
            check()
        except Exception as e:
            holds("it comes to an end", False, repr(e))
        with open(DIR + "/results", "a") as f:
            f.writelines(f"{label}\t{group}\t{'pass' if passed else 'fail'}\t{name}\n" for passed, name in results)
        bad = sum(not passed for passed, _ in results)
        failed += bad
        print(f"{label}: {group}: {len(results) - bad} of {len(results)}, {time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(failed > 0)


main()
