package tombolo

import (
	"encoding/json"
	"fmt"
)

// Difference is one difference between the intended and the actual state, as the methods Check and Differences of this
// module find it. Its text is for the operator.
type Difference struct {
	Object string // "port vethab…", "chain forward of table inet tombolo"
	What   string // "MTU", "address", "rule"
	Want   string // empty if there should be nothing
	Have   string // empty if there is nothing

	// Text is the whole description, for a difference that is not about one attribute of one object. The fields above
	// are then empty.
	Text string

	// Remedy is the way to repair the difference. It is empty if the package that found the difference knows none.
	Remedy Remedy
}

// Remedy is the way to repair a difference, in words for an operator. It is empty if unknown: a package that compares
// one kernel object does not know which program should repair that object.
type Remedy string

// The remedies for the differences that package network finds. Packages bandwidth and vlan set RemedyConfigure too.
const (
	RemedyRepair    Remedy = "repair"         // Node.Repair; tombolo repair
	RemedyCollect   Remedy = "gc"             // garbage collection of pods that died without a Del
	RemedyRecreate  Remedy = "recreate pod"   // Del and Add of the pod
	RemedyKeeper    Remedy = "start tombolod" // tombolod, which renews leases, does not run
	RemedyConfigure Remedy = "configuration"  // change the configuration of the host, the network or another program
)

// MarshalJSON returns a JSON object with the text of the difference and its remedy, if any.
func (d Difference) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Text   string `json:"text"`
		Remedy Remedy `json:"remedy,omitempty"`
	}{d.String(), d.Remedy})
}

// String returns the difference in one line, such as "port vethab…: MTU is 1400, should be 1500".
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
