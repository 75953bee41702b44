package upstream

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const nfDrop = 0 // NF_DROP of linux/netfilter.h

// rule is a rule as a kernel lists it, of expressions by their names.
func rule(t *testing.T, write func(add func(name string, body func(ae *netlink.AttributeEncoder)))) []byte {
	t.Helper()
	return append(make([]byte, 4), attributes(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, "filter")
		ae.String(unix.NFTA_RULE_CHAIN, "forward")
		ae.Nested(unix.NFTA_RULE_EXPRESSIONS, func(ae *netlink.AttributeEncoder) error {
			write(func(name string, body func(ae *netlink.AttributeEncoder)) {
				ae.Nested(unix.NFTA_LIST_ELEM, func(ae *netlink.AttributeEncoder) error {
					ae.String(unix.NFTA_EXPR_NAME, name)
					ae.Nested(unix.NFTA_EXPR_DATA, func(ae *netlink.AttributeEncoder) error {
						ae.ByteOrder = binary.BigEndian
						body(ae)
						return nil
					})
					return nil
				})
			})
			return nil
		})
	})...)
}

// verdict writes one in some bytes, of which the kernel's has 4 for the code.
func verdict(code uint32, size int) func(ae *netlink.AttributeEncoder) {
	return func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		ae.Nested(unix.NFTA_IMMEDIATE_DATA, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(unix.NFTA_DATA_VERDICT, func(ae *netlink.AttributeEncoder) error {
				ae.ByteOrder = binary.BigEndian
				ae.Bytes(unix.NFTA_VERDICT_CODE, binary.BigEndian.AppendUint32(nil, code)[:size])
				return nil
			})
			return nil
		})
	}
}

// listed has the library read a message that lists something.
func listed(t *testing.T, typ uint16, data []byte) *nftables.Conn {
	t.Helper()
	c, err := nftables.New(nftables.WithTestDial(func(req []netlink.Message) ([]netlink.Message, error) {
		if len(req) == 0 {
			return nil, nil
		}
		h := netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Sequence: req[0].Header.Sequence, PID: req[0].Header.PID}
		return []netlink.Message{{Header: h, Data: data}}, nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func readRule(t *testing.T, data []byte) []expr.Any {
	t.Helper()
	table := &nftables.Table{Name: "filter", Family: nftables.TableFamilyINet}
	list, err := listed(t, unix.NFT_MSG_NEWRULE, data).GetRules(table, &nftables.Chain{Name: "forward", Table: table})
	if err != nil || len(list) != 1 {
		t.Fatalf("%d rules, %v", len(list), err)
	}
	return list[0].Exprs
}

func TestAnUnknownExpressionOfARuleIsSeen(t *testing.T) {
	got := readRule(t, rule(t, func(add func(string, func(*netlink.AttributeEncoder))) {
		add("osf", func(ae *netlink.AttributeEncoder) { ae.Uint32(1, 1) }) // a condition
		add("immediate", verdict(nfDrop, 4))
	}))
	if len(got) != 2 {
		t.Errorf("a rule that drops what meets a condition is read as one that drops all: %d expression", len(got))
	}
}

func TestAForwardingExpressionIsRead(t *testing.T) {
	got := readRule(t, rule(t, func(add func(string, func(*netlink.AttributeEncoder))) {
		add("fwd", func(ae *netlink.AttributeEncoder) { ae.Uint32(unix.NFTA_FWD_SREG_DEV, 1) })
	}))
	if len(got) != 1 {
		t.Errorf("%d expressions, want the fwd", len(got))
	}
}

func TestAShiftIsNotReadAsAMask(t *testing.T) {
	const op, data, lshift = 6, 7, 1 // NFTA_BITWISE_OP, NFTA_BITWISE_DATA, NFT_BITWISE_LSHIFT: Linux 5.6
	got := readRule(t, rule(t, func(add func(string, func(*netlink.AttributeEncoder))) {
		add("bitwise", func(ae *netlink.AttributeEncoder) {
			ae.Uint32(unix.NFTA_BITWISE_SREG, 1)
			ae.Uint32(unix.NFTA_BITWISE_DREG, 1)
			ae.Uint32(unix.NFTA_BITWISE_LEN, 4)
			ae.Uint32(op, lshift)
			ae.Nested(data, func(ae *netlink.AttributeEncoder) error {
				ae.Bytes(unix.NFTA_DATA_VALUE, []byte{0, 0, 0, 23})
				return nil
			})
		})
	}))
	if text := fmt.Sprintf("%+v", reflect.Indirect(reflect.ValueOf(got[0]))); !strings.Contains(text, "23") {
		t.Errorf("a shift by 23 bits is read as %s", text)
	}
}

func TestAVerdictThatIsTooShortIsAnError(t *testing.T) {
	defer func() {
		if r := recover(); r != nil {
			t.Errorf("panic: %v", r)
		}
	}()
	table := &nftables.Table{Name: "filter", Family: nftables.TableFamilyINet}
	data := rule(t, func(add func(string, func(*netlink.AttributeEncoder))) { add("immediate", verdict(nfDrop, 0)) })
	if _, err := listed(t, unix.NFT_MSG_NEWRULE, data).GetRules(table, &nftables.Chain{Name: "forward", Table: table}); err == nil {
		t.Error("no error")
	}
}

func TestCommentOfAChainIsRead(t *testing.T) {
	const userdata = 12 // NFTA_CHAIN_USERDATA, Linux 5.7
	data := append(make([]byte, 4), attributes(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, "filter")
		ae.String(unix.NFTA_CHAIN_NAME, "forward")
		ae.Bytes(userdata, []byte("\x00\x06whose\x00"))
	})...)
	data[0] = unix.NFPROTO_INET
	list, err := listed(t, unix.NFT_MSG_NEWCHAIN, data).ListChains()
	if err != nil || len(list) != 1 {
		t.Fatalf("%d chains, %v", len(list), err)
	}
	if !hasField(reflect.TypeFor[nftables.Chain](), "userdata", "comment") {
		t.Errorf("a chain has no comment to be read or written: %+v", *list[0])
	}
}

func TestAnElementCanBeAddedExclusively(t *testing.T) {
	if !hasField(reflect.TypeFor[nftables.SetElement](), "excl") && !hasMethod(reflect.TypeFor[*nftables.Conn](), "excl", "createelem", "setcreate") {
		t.Error("there is no way to have NLM_F_EXCL set: to add an element that is there succeeds, and keeps the old one's comment")
	}
}

func hasField(of reflect.Type, words ...string) bool {
	for i := range of.NumField() {
		if contains(of.Field(i).Name, words) {
			return true
		}
	}
	return false
}

func hasMethod(of reflect.Type, words ...string) bool {
	for i := range of.NumMethod() {
		if contains(of.Method(i).Name, words) {
			return true
		}
	}
	return false
}

func contains(name string, words []string) bool {
	for _, w := range words {
		if strings.Contains(strings.ToLower(name), w) {
			return true
		}
	}
	return false
}
