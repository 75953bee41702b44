package addr

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// copyOf reads an address, has it on record, and gives the request that adds it again.
func copyOf(m netlink.Message) (netlink.Message, error) {
	a, err := decode(m.Data)
	if err != nil {
		return netlink.Message{}, err
	}
	text, err := json.Marshal(a)
	if err != nil {
		return netlink.Message{}, err
	}
	var again Address
	if err := json.Unmarshal(text, &again); err != nil {
		return netlink.Message{}, err
	}
	return again.ReplaceMessage()
}

// said gives what a message says, without what is the kernel's to say.
func said(m netlink.Message) []string {
	b := m.Data
	head := fmt.Sprintf("family %d, prefix %d, link %d", b[0], b[1], binary.NativeEndian.Uint32(b[4:]))
	asked := askable6
	if b[0] == unix.AF_INET {
		head += fmt.Sprintf(", scope %d", b[3]) // the kernel derives IPv6's
		asked = askable4
	}
	list, err := netlink.UnmarshalAttributes(b[unix.SizeofIfAddrmsg:])
	if err != nil {
		panic(err)
	}
	lines := map[uint16]string{} // the kernel takes the last of a type
	for _, a := range list {
		switch a.Type {
		case unix.IFA_UNSPEC: // rtnetlink's
		case unix.IFA_FLAGS:
			lines[a.Type] = fmt.Sprint("flags ", Flags(binary.NativeEndian.Uint32(a.Data))&asked)
		case unix.IFA_CACHEINFO: // behind the lifetimes, when it was added and changed
			if lifetimes := fmt.Sprintf("%x", a.Data[:8]); lifetimes != "ffffffffffffffff" {
				lines[a.Type] = "lifetimes " + lifetimes
			}
		default:
			lines[a.Type] = fmt.Sprintf("%d: %x", a.Type, a.Data)
		}
	}
	all := []string{head}
	for _, line := range lines {
		all = append(all, line)
	}
	slices.Sort(all)
	return all
}

// mustKeepUnknown fails where attributes are lost that no kernel of today has.
func mustKeepUnknown(t *testing.T, listed, copied []byte) {
	t.Helper()
	const unheardOf = 64
	unknown := func(b []byte) []netlink.Attribute {
		var list []netlink.Attribute
		if err := nl.Decode(b[unix.SizeofIfAddrmsg:], func(ad *netlink.AttributeDecoder) error {
			if ad.Type() >= unheardOf {
				list = append(list, nl.Keep(ad))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return list
	}
	if diff := cmp.Diff(unknown(listed), unknown(copied)); diff != "" {
		t.Errorf("unknown attributes (-listed +copied):\n%s", diff)
	}
}
