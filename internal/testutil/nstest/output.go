package nstest

import (
	"bytes"
	"sync"
)

// Output takes what a program writes, and can be read meanwhile.
type Output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write is part of io.Writer.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

// String is all that was written so far.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}
