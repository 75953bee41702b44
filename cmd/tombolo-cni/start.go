package main

import "runtime"

// prepare switches off work of Go's runtime that pays only for long-lived processes. Such work is the sampling of
// allocations, and a stack that grows by doubling, each time with more frames to copy. This saves a twentieth of a
// call.
func prepare() {
	runtime.MemProfileRate = 0
	growStack(false)
}

// stackSize is the size in bytes of a stack that suffices for the deepest calls.
const stackSize = 24 << 10

// growStack makes the stack grow to stackSize bytes. The stack keeps that size after the call. If the function were
// inlined, the bytes would be part of main's frame, and deeper calls would have to grow the stack again.
//
//go:noinline
func growStack(use bool) byte {
	if !use {
		return 0
	}
	var room [stackSize]byte
	return occupy(&room)
}

// occupy writes to the bytes, so that the compiler does not remove them.
//
//go:noinline
func occupy(room *[stackSize]byte) byte {
	for i := range room {
		room[i] = byte(i)
	}
	return room[stackSize/2]
}
