package upstream

import (
	"reflect"
	"testing"

	"github.com/mdlayher/packet"
)

func TestAPacketSocketCanBeOpenedInANamespace(t *testing.T) {
	if !hasField(reflect.TypeFor[packet.Config](), "netns") {
		t.Error("Config has no namespace: the caller has to lock its thread and enter one, as netlink.Config.NetNS spares it")
	}
}
