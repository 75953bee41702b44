package ipam

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// reference is the directory with the reference plugins, of containernetworking/plugins v1.9.1.
func reference(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("TOMBOLO_PEERS")
	if dir == "" {
		t.Skip("peers not built: set TOMBOLO_PEERS to a directory with host-local of containernetworking/plugins v1.9.1")
	}
	must.Succeed(t, expect.Err(os.Stat(filepath.Join(dir, "host-local"))), "TOMBOLO_PEERS")
	return dir
}

// runReference runs the reference with the verb for eth0 of the container.
func (n *node) runReference(dir, verb, id string) (*Allocation, error) {
	n.t.Helper()
	cmd := exec.Command(filepath.Join(dir, "host-local"))
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+id, "CNI_NETNS=/run/netns/"+id, "CNI_IFNAME=eth0", "CNI_PATH="+dir)
	cmd.Stdin = strings.NewReader(`{"cniVersion":"1.1.0","name":"lan","type":"tombolo","ipam":{"type":"host-local","dataDir":"` +
		n.dataDir + `","ranges":[` + n.sets + `]}}`)
	stdout, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, stdout)
	}
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	given := &Allocation{}
	if verb == "ADD" {
		err := json.Unmarshal(stdout, &result)
		must.That(n.t, err == nil, "reference: %v: %s", err, stdout)
	}
	for _, ip := range result.IPs {
		given.Addresses = append(given.Addresses, Address{Prefix: ip.Address})
	}
	return given, nil
}

func (n *node) mustRunReference(dir, verb, id string) string {
	n.t.Helper()
	result := must.Of(n.runReference(dir, verb, id)).Get(n.t, "reference %s %s", verb, id)
	return addressesOf(result)
}

func TestTheReferenceAndWeWriteTheSameFiles(t *testing.T) {
	t.Parallel()
	dir := reference(t)
	const sets = `[{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.250"},{"subnet":"10.2.0.0/30"}],[{"subnet":"fd00:0:0:0:1::/80"}]`
	ours, theirs := newNode(t, sets), newNode(t, sets)
	for i := range 6 {
		id := fmt.Sprintf("0123456789abcdef%d", i)
		got, want := ours.add(id), theirs.mustRunReference(dir, "ADD", id)
		expect.That(t, got == want, "%s: we give %s, the reference %s", id, got, want)
		if i == 2 {
			ours.del(id)
			theirs.mustRunReference(dir, "DEL", id)
		}
	}
	expect.Equal(t, cmp.Diff(theirs.files(), ours.files()), "", "files (-reference +ours)")
}

func TestTheReferenceAndWeSeeEachOthersReservations(t *testing.T) {
	t.Parallel()
	dir := reference(t)
	n := newNode(t, `[{"subnet":"10.1.0.0/29"}],[{"subnet":"fd00::/125"}]`)
	n.epoch = Epoch{Token: "now", Started: boot}
	n.live = liveAddrs(liveAt("fd00::6", Owner{"found", "eth0"}))
	got := strings.Join([]string{
		n.add("ours1"), n.mustRunReference(dir, "ADD", "theirs1"), n.add("ours2"), n.mustRunReference(dir, "ADD", "theirs2"),
	}, " ")
	want := "10.1.0.2,fd00::2 10.1.0.3,fd00::3 10.1.0.4,fd00::4 10.1.0.5,fd00::5"
	must.That(t, got == want, "got %s, want %s", got, want)
	for _, id := range []string{"ours1", "theirs1"} {
		n.mustRunReference(dir, "CHECK", id)
		expect.Success(t, n.allocator(n.request(id)).Check(context.Background(), nil), "our CHECK of %s", id)
	}
	expect.Says(t, expect.Err(n.runReference(dir, "ADD", "ours1")), "duplicate allocation", "the reference does not see that ours1 has an address")
	// The reference passes over what we found alive, and does not take our marker for anything.
	expect.Equal(t, n.mustRunReference(dir, "ADD", "theirs3"), "10.1.0.6,fd00::7", "reference ADD gave")
	expect.Failure(t, expect.Err(n.tryAdd(n.request("late"))), "we gave an address of a full pool")
	expect.Failure(t, expect.Err(n.runReference(dir, "ADD", "late")), "the reference gave an address of a full pool")
	// Each releases what the other reserved.
	n.mustRunReference(dir, "DEL", "ours1")
	n.del("theirs1")
	expect.Success(t, n.allocator(n.request("theirs2")).Del(context.Background(), nstest.Addrs("10.1.0.5", "fd00::5")))
	n.mustRunReference(dir, "DEL", "ours2")
	n.mustRunReference(dir, "DEL", "nobody")
	n.expect(map[string]string{
		"10.1.0.6": "theirs3\r\neth0", "fd00::7": "theirs3\r\neth0", "fd00::6": "tombolo:" + hashOf(Owner{"found", "eth0"}) + "\r\n",
		"last_reserved_ip.0": "10.1.0.6", "last_reserved_ip.1": "fd00::7",
	})
	got, want = n.marker(), "now"
	expect.That(t, got == want, "the reference changed our marker to %s", got)
}

func TestTheReferenceWaitsForOurLock(t *testing.T) {
	t.Parallel()
	dir := reference(t)
	n := newNode(t, `[{"subnet":"10.1.0.0/24"}]`)
	n.add("first")
	s, err := n.request("a").store().lock(context.Background())
	must.Succeed(t, err)
	added := make(chan error, 1)
	go func() {
		_, err := n.runReference(dir, "ADD", "theirs")
		added <- err
	}()
	awaitWaiter(t, inode(t, filepath.Join(n.dir(), lockName)))
	if len(n.files()) != 2 {
		t.Errorf("the reference did not wait: %v", n.files())
	}
	s.unlock()
	expect.Success(t, <-added)
}
