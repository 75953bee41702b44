package main

import "runtime"

// prepare switches off work of Go's runtime that only pays for long-lived processes: sampling of allocations, and a
// stack that grows by doubling, each time with more frames to copy. Together this saves a twentieth of a call.
func prepare() {
	runtime.MemProfileRate = 0
	growStack(false)
}

// stackSize is enough for the deepest calls.
const stackSize = 24 << 10

// growStack needs stackSize bytes on the stack. The stack keeps that size after the call. Inlined, the bytes would be
// part of main's frame, and deeper calls would have to grow the stack again.
//
//go:noinline
func growStack(use bool) byte {
	if !use {
		return 0
	}
	var room [stackSize]byte
	return occupy(&room)
}

// occupy uses the bytes, so that the compiler does not remove them.
//
//go:noinline
func occupy(room *[stackSize]byte) byte {
	for i := range room {
		room[i] = byte(i)
	}
	return room[stackSize/2]
}
