// Command tombolo is the operator's: see tombolo help. The CNI plugin is tombolo-cni.
package main

import (
	"encoding/json"
	"io"
	"os"
	"runtime/debug"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/cni"
)

func main() {
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(misplaced(os.Stdout))
	}
	debug.SetGCPercent(collectAt)
	os.Exit(operator(os.Args[1:]))
}

// collectAt has the heap grow to five times what is in use before it is collected. A command ends before it has much, and
// of a repair of 200 pods the collector's default takes a tenth of the CPU time.
const collectAt = 400

// misplaced tells a runtime, in the way of CNI, that the file which it started is the wrong one.
func misplaced(out io.Writer) int {
	versions := cni.SupportedVersions()
	_ = json.NewEncoder(out).Encode(struct {
		CNIVersion string `json:"cniVersion"`
		types.Error
	}{versions[len(versions)-1], types.Error{
		Code: types.ErrInvalidEnvironmentVariables,
		Msg:  "this file is the operator's command tombolo, and no CNI plugin: tombolo-cni belongs here, by the name tombolo; sudo tombolo install DIR puts it there",
	}})
	return 1
}
