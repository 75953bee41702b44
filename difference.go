package tombolo

import (
	"encoding/json"
	"fmt"
)

// Difference is one thing that is not as it was asked for: what the Check of a
// package finds. It is worded for the operator, by the names that ip and nft print.
type Difference struct {
	Object string // "port vethab…", "chain forward of table inet tombolo"
	What   string // "MTU", "address", "rule"
	Want   string // empty where there should be nothing
	Have   string // empty where there is nothing

	// Text says it all where it is no attribute of an object. Then the others are empty.
	Text string

	// Remedy is what mends it, as far as the one who found it knows.
	Remedy Remedy
}

// Remedy is what mends a difference, in words for an operator. The empty one is not known: a
// package that compares an object of the kernel does not know who would put it right.
type Remedy string

// These are package network's words for a node's differences.
const (
	RemedyRepair    Remedy = "repair"         // Node.Repair; tombolo repair
	RemedyCollect   Remedy = "gc"             // garbage collection of pods that died without a Del
	RemedyRecreate  Remedy = "recreate pod"   // Del and Add of the pod
	RemedyKeeper    Remedy = "start tombolod" // the program that keeps leases
	RemedyConfigure Remedy = "configuration"  // of the host, the network, or another program
)

// MarshalJSON gives the difference by its text and its remedy.
func (d Difference) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Text   string `json:"text"`
		Remedy Remedy `json:"remedy,omitempty"`
	}{d.String(), d.Remedy})
}

// String gives one line: "port vethab…: MTU is 1400, should be 1500".
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
