package nftnl

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// DefaultMark is the mark bit if Config.Mark is 0. Packets with this bit may be forwarded for pods. docs/config.md
// lists the bits that other programs use.
const DefaultMark = 0x10

// DefaultTable is the name of our tables if Config.Table is empty.
const DefaultTable = "tombolo"

// maxTable is the maximum length of a table's name in bytes. Such a name still fits into the comment of a rule.
const maxTable = 32

// CheckTable returns an error that matches tombolo.ErrInvalid if a Config has an invalid Table or Mark. An empty name
// means DefaultTable. A mark of 0 is valid only with DefaultTable: any other table needs its own mark.
func CheckTable(name string, mark uint32) error {
	for i, c := range []byte(name) {
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (i == 0 || (c < '0' || c > '9') && c != '_' && c != '.' && c != '-') {
			return fmt.Errorf("%w: table %.64q: want a letter first, and then letters, digits, '_', '.' and '-'",
				tombolo.ErrInvalid, name)
		}
	}

	switch {
	case len(name) > maxTable:
		return fmt.Errorf("%w: table %.64q: %d characters, where %d are due at most", tombolo.ErrInvalid, name,
			len(name), maxTable)
	case name != "" && name != DefaultTable && mark == 0:
		return fmt.Errorf("%w: table %s needs a mark of its own: that of table %s is cleared by it", tombolo.ErrInvalid,
			name, DefaultTable)
	}

	return nil
}

// PriorityForward is the priority of the chain that marks pods' packets. nft calls it "filter - 10".
const PriorityForward = -10

// FamilyName returns nft's name for a table family (unix.NFPROTO_*).
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

// Table describes a table in the kernel (NFT_MSG_NEWTABLE).
type Table struct{ Flags uint32 }

// IsDormant reports whether the table is inactive, with all chains unhooked (nft's flag "dormant").
func (t Table) IsDormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// DecodeTable parses the attributes of a table.
func DecodeTable(b []byte) Table { return Table{Flags: Number(Find(b, unix.NFTA_TABLE_FLAGS))} }

// Chain describes a chain in the kernel (NFT_MSG_NEWCHAIN). If Kind is empty, it is no base chain: only rules of its
// own table call it.
type Chain struct {
	Table, Name string
	Kind        string
	Hook        uint32
	Device      string // in family netdev: the name of the link with the hook, if that link exists
	Priority    int32
	Policy      uint32
	Uses        uint32 // the number of its rules plus the number of jumps to it
	Comment     string
}

// ChainUserdata is the attribute NFTA_CHAIN_USERDATA (Linux 5.10).
const ChainUserdata = 12

// DecodeChain parses the attributes of a chain.
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

// DoctorName is the name of the thread in which `tombolo doctor` changes its own table. The kernel announces the name
// with each change, so that the keeper can ignore these changes.
const DoctorName = "tombolo-doctor"
