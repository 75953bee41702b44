package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// manager is a program that maintains its own firewall rules.
type manager struct {
	prefixes string // prefixes of the names of its chains and tables
	name     string
	command  string // a command that shows the program's settings; for some programs also one that changes them
}

const policies = "kubectl get networkpolicy"

// managerOf returns the program that manages the rule's chain, judged by the names of chain and table. It returns nil
// for an unknown chain, and for DOCKER-USER, which belongs to the operator.
func managerOf(r *rule) *manager {
	list := []manager{
		{"KUBE-POD-FW- KUBE-NWPLCY- KUBE-ROUTER-", "kube-router", policies},
		{"KUBE- kube-proxy", "kube-proxy", "kubectl get services,endpointslices -A"},
		{"kube-network-policies", "kube-network-policies", policies},
		{"kindnet", "kindnet", policies},
		{"cali- calico", "Calico", policies},
		{"CILIUM_", "Cilium", policies},
		{"DOCKER docker-", "Docker", "docker network inspect $(docker network ls -q)"},
		{"NETAVARK netavark", "podman", "podman network inspect $(podman network ls -q)"},
		{"LIBVIRT_ libvirt", "libvirt", "virsh net-list --all"},
		{"f2b-", "fail2ban", "fail2ban-client status"},
		{"firewalld", "firewalld", "firewall-cmd --list-all-zones; firewall-cmd --list-all-policies"},
		{"ufw-user- ufw6-user-", "ufw", "ufw status numbered, and ufw delete NUMBER"},
		{"ufw", "ufw", "ufw status verbose, and the rules in /etc/ufw"},
	}
	isOf := func(m manager) bool {
		return slices.ContainsFunc(strings.Fields(m.prefixes), func(prefix string) bool {
			return strings.HasPrefix(r.chain, prefix) || strings.HasPrefix(r.table, prefix)
		})
	}
	i := slices.IndexFunc(list, isOf)
	if i < 0 || r.chain == "DOCKER-USER" {
		return nil
	}
	return &list[i]
}

// governs returns the remedy for a rule that the program m manages. The remedy never deletes the rule with nft. The
// program would create the rule again, and until then its protection would be missing. comment is the rule's comment.
func (m *manager) governs(comment string) string {
	command := m.command
	if command == policies {
		command += " -A"
		if match := regexp.MustCompile(`namespace: ?([a-z0-9.-]+)`).FindStringSubmatch(comment); match != nil {
			command = fmt.Sprintf("kubectl -n %s get networkpolicy", match[1])
		}
	}
	return fmt.Sprintf("leave the rule to %s, and see what it is made from: %s", m.name, command)
}

// queuedBy returns a finding that the rule r sends a packet to a queue, and that the packet does not come back. The
// argument what describes the packet.
func (e *examination) queuedBy(r *rule, what string) *Finding {
	listening := map[uint16]bool{}
	e.fail(e.host.Do(func() (err error) {
		listening, err = nftnl.QueueListeners()
		return err
	}))
	number, comment, err := r.find()
	e.fail(err)
	evidence := fmt.Sprintf("%s hands, by its rule number %d with handle %d%s, to queue %d %s", r, number, r.handle,
		quoted(r, comment), r.queue, what)
	does := "and the program that listens there drops or keeps it"
	remedy := fmt.Sprintf("see the settings of the program at queue %d, in a cluster: %s -A", r.queue, policies)
	if m := managerOf(r); m != nil {
		remedy = m.governs(comment)
	}

	if !listening[r.queue] {
		does = "and no program listens there"
		remedy = fmt.Sprintf("start the program that listens at queue %d, in a cluster the engine of its "+
			"NetworkPolicies", r.queue)
	}
	return finding(StepFirewall, remedy, "%s, %s", evidence, does)
}

// quoted returns a rule's comment and the name of its manager, as a part of a sentence. It returns "" if the rule has
// neither.
func quoted(r *rule, comment string) (text string) {
	if comment != "" {
		text = fmt.Sprintf(" (%q)", comment)
	}
	if m := managerOf(r); m != nil {
		text += ", which is " + m.name + "'s,"
	}
	return text
}
