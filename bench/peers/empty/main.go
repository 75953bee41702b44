// Empty is a CNI plugin that does nothing: it reads its configuration and prints a
// result that is always the same. What an ADD of it takes is what the Go runtime takes
// to start and to end, so no plugin in Go can be faster.
package main

import (
	"io"
	"os"
)

const result = `{"cniVersion":"1.1.0","ips":[{"address":"10.88.0.2/16","gateway":"10.88.0.1"}]}`

func main() {
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		os.Exit(1)
	}
	if os.Getenv("CNI_COMMAND") == "ADD" {
		_, _ = os.Stdout.WriteString(result)
	}
}
