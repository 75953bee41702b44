package nftnl

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// DefaultMark is the bit of a packet's mark that says that a pod may have it forwarded, where
// a Config names none. docs/config.md lists the bits of other programs.
const DefaultMark = 0x10

// DefaultTable is the name of our tables, where a Config names none.
const DefaultTable = "tombolo"

// maxTable leaves room for the name in the comment of a rule.
const maxTable = 32

// CheckTable says what is wrong with a Config's name of tables, and its mark.
func CheckTable(name string, mark uint32) error {
	for i, c := range []byte(name) {
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (i == 0 || (c < '0' || c > '9') && c != '_' && c != '.' && c != '-') {
			return fmt.Errorf("%w: table %.64q: want a letter first, and then letters, digits, '_', '.' and '-'", tombolo.ErrInvalid, name)
		}
	}
	switch {
	case len(name) > maxTable:
		return fmt.Errorf("%w: table %.64q: %d characters, where %d are due at most", tombolo.ErrInvalid, name, len(name), maxTable)
	case name != "" && name != DefaultTable && mark == 0:
		return fmt.Errorf("%w: table %s needs a mark of its own: that of table %s is cleared by it", tombolo.ErrInvalid, name, DefaultTable)
	}
	return nil
}

// PriorityForward is where pods' packets get that mark: "filter - 10", by nft's names.
const PriorityForward = -10

// FamilyName is how nft calls a family of tables (unix.NFPROTO_*).
func FamilyName(family uint8) string {
	switch family {
	case unix.NFPROTO_INET:
		return "inet"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	case unix.NFPROTO_NETDEV:
		return "netdev"
	case unix.NFPROTO_IPV4:
		return "ip"
	case unix.NFPROTO_IPV6:
		return "ip6"
	}
	return strconv.Itoa(int(family))
}

// Table is a table as the kernel has it: NFT_MSG_NEWTABLE.
type Table struct{ Flags uint32 }

// IsDormant says that the table's chains are all unhooked (nft: flags dormant).
func (t Table) IsDormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// DecodeTable reads one.
func DecodeTable(b []byte) Table { return Table{Flags: Number(Find(b, unix.NFTA_TABLE_FLAGS))} }

// Chain is a chain as the kernel has it: NFT_MSG_NEWCHAIN. A chain that is no base chain has
// no kind, and nothing calls it but rules of the table.
type Chain struct {
	Table, Name string
	Kind        string
	Hook        uint32
	Device      string // of family netdev: the name of the link whose hook it is, if that exists
	Priority    int32
	Policy      uint32
	Uses        uint32 // how many rules it has, and jumps there are to it
	Comment     string
}

// ChainUserdata is NFTA_CHAIN_USERDATA, Linux 5.10.
const ChainUserdata = 12

// DecodeChain reads one.
func DecodeChain(b []byte) Chain {
	text := func(path ...uint16) string { return Text(Find(b, path...)) }
	number := func(path ...uint16) uint32 { return Number(Find(b, path...)) }
	comment, _ := CommentOf(Find(b, ChainUserdata))
	return Chain{
		Table: text(unix.NFTA_CHAIN_TABLE), Name: text(unix.NFTA_CHAIN_NAME), Kind: text(unix.NFTA_CHAIN_TYPE),
		Hook:     number(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_HOOKNUM),
		Device:   text(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_DEV),
		Priority: int32(number(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_PRIORITY)),
		Policy:   number(unix.NFTA_CHAIN_POLICY), Uses: number(unix.NFTA_CHAIN_USE), Comment: comment,
	}
}

// DoctorName is what the kernel calls a doctor that makes its table: the keeper need not look at that change.
const DoctorName = "tombolo-doctor"
