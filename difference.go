package tombolo

import (
	"encoding/json"
	"fmt"
)

// Difference is one difference between the intended and the actual state, found by the Check of a package. It is worded
// for the operator, with the names that ip and nft print.
type Difference struct {
	Object string // "port vethab…", "chain forward of table inet tombolo"
	What   string // "MTU", "address", "rule"
	Want   string // empty if there should be nothing
	Have   string // empty if there is nothing

	// Text is the whole description if it does not concern an attribute of an object. Then the fields above are empty.
	Text string

	// Remedy is the way to repair it, if the finder knows one.
	Remedy Remedy
}

// Remedy is the way to repair a difference, in words for an operator. It is empty if unknown: a package that compares
// an object of the kernel does not know who should repair it.
type Remedy string

// The remedies that package network gives for a node's differences.
const (
	RemedyRepair    Remedy = "repair"         // Node.Repair; tombolo repair
	RemedyCollect   Remedy = "gc"             // garbage collection of pods that died without a Del
	RemedyRecreate  Remedy = "recreate pod"   // Del and Add of the pod
	RemedyKeeper    Remedy = "start tombolod" // tombolod, which renews leases, does not run
	RemedyConfigure Remedy = "configuration"  // change the configuration of the host, the network or another program
)

// MarshalJSON returns the difference as its text and its remedy.
func (d Difference) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Text   string `json:"text"`
		Remedy Remedy `json:"remedy,omitempty"`
	}{d.String(), d.Remedy})
}

// String returns one line: "port vethab…: MTU is 1400, should be 1500".
func (d Difference) String() string {
	switch {
	case d.Text != "":
		return d.Text
	case d.Have == "":
		return fmt.Sprintf("%s: %s %s is missing", d.Object, d.What, d.Want)
	case d.Want == "":
		return fmt.Sprintf("%s: %s %s does not belong there", d.Object, d.What, d.Have)
	default:
		return fmt.Sprintf("%s: %s is %s, should be %s", d.Object, d.What, d.Have, d.Want)
	}
}
