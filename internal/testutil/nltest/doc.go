// Package nltest has kernels for tests of package nl and of what is built on it:
// one that is made up (Fake), and a real one that is made to fail (Faulty), to be
// recorded (Recorder) or to interrupt its dumps. Shipped code never imports it.
package nltest
