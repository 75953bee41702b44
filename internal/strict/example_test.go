package strict_test

import (
	"fmt"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/strict"
)

func ExampleUnmarshal() {
	var conf struct {
		Bridge    string `json:"bridge"`
		IsGateway bool   `json:"isGateway"`
	}
	comments := func(path, key string) bool { return strings.HasPrefix(key, "_") }
	err := strict.Unmarshal([]byte(`{"_note": "for the lab", "bridge": "br0", "isGatway": true}`), &conf, comments)
	fmt.Println(conf.Bridge)
	fmt.Println(err)
	// Output:
	// br0
	// unknown field "isGatway": true (did you mean "isGateway"?)
}
