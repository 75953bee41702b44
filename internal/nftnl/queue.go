package nftnl

import (
	"encoding/binary"
	"errors"
	"os"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Queue describes the user-space queues (NFQUEUE) that a rule passes packets to: Total queues from First on.
type Queue struct {
	First, Total uint16
	Bypass       bool // the kernel accepts the packet if no program listens
}

// QueueOf returns the queues that a rule, an NFT_MSG_NEWRULE, passes packets to. ok is false for any other rule, and
// for a rule that computes the queue's number.
func QueueOf(rule []byte) (q Queue, ok bool) {
	Each(Find(rule, unix.NFTA_RULE_EXPRESSIONS), func(b []byte) {
		own := Find(b, unix.NFTA_EXPR_DATA)
		const targetName, targetInfo = 1, 3
		info := Find(own, targetInfo)
		switch name := Text(Find(b, unix.NFTA_EXPR_NAME)); {
		case name == "queue":
			var e expr.Queue
			if err := expr.Unmarshal(0, own, &e); err == nil && e.Total > 0 {
				q, ok = Queue{e.Num, e.Total, e.Flag&expr.QueueFlagBypass != 0}, true
			}
		case name == "target" && Text(Find(own, targetName)) == "NFQUEUE" && len(info) >= 8:
			// This is struct xt_NFQ_info_v3. For the revisions 0 and 1, its last fields are zero.
			at := func(offset int) uint16 { return binary.NativeEndian.Uint16(info[offset:]) }
			q, ok = Queue{at(0), max(at(2), 1), at(4)&1 != 0}, true
		}
	})
	return q, ok
}

// QueueListeners returns the numbers of the queues that programs in this network namespace read.
func QueueListeners() (map[uint16]bool, error) {
	text, err := os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_queue")
	if errors.Is(err, os.ErrNotExist) { // the module is not loaded
		err = nil
	}
	list := map[uint16]bool{}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if n, err := strconv.ParseUint(fields[0], 10, 16); err == nil {
			list[uint16(n)] = true
		}
	}
	return list, err
}

// RuleComment returns the comment of a rule, an NFT_MSG_NEWRULE, in the form of nft or of iptables.
func RuleComment(rule []byte) string {
	comment, _ := CommentOf(Find(rule, unix.NFTA_RULE_USERDATA))
	Each(Find(rule, unix.NFTA_RULE_EXPRESSIONS), func(b []byte) {
		const matchName, matchInfo = 1, 3
		own := Find(b, unix.NFTA_EXPR_DATA)
		if Text(Find(b, unix.NFTA_EXPR_NAME)) == "match" && Text(Find(own, matchName)) == "comment" {
			comment = Text(Find(own, matchInfo))
		}
	})
	return comment
}
