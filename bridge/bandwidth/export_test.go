package bandwidth

import "github.com/tombolo-cni/tombolo/internal/nl"

// On is a Conn over a test's connection.
func On(conn *nl.Conn) *Conn { return &Conn{nl: conn} }
