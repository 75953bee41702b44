// Package strict decodes JSON that people write by hand, and explains what is
// wrong with it in their words.
//
// It follows the rules of encoding/json (tags, embedding, null,
// [json.Unmarshaler], [encoding.TextUnmarshaler]) with four differences, all of
// which turn a silent surprise into an error:
//   - a key that no field has is an [UnknownFieldError], which names the nearest
//     field;
//   - keys match exactly: "isgateway" is not taken for "isGateway", but where
//     unknown keys are passed over (see [Exempt]);
//   - a key given twice in one object is a [DuplicateKeyError];
//   - the top level must be an object.
//
// Raw messages, maps, interfaces and types that unmarshal themselves are opaque:
// nothing is looked up inside of them. The option ",string" of a tag is not
// supported and is ignored.
//
// # Why not encoding/json
//
// A CNI plugin is a process that decodes one document and exits. The first call
// of encoding/json costs 0.15 to 0.2 ms for a netconf with some 30 fields, nearly
// all of it spent on building decoders that are then used once; what comes after
// that costs 0.01 ms. This package builds less and keeps nothing: its first call
// takes some two thirds of that time. BenchmarkColdCall measures both.
//
// One pass does everything, so the first problem in the document is the one that
// is reported, and it is reported with its path. encoding/json, by contrast,
// names no field for the errors of types that unmarshal themselves, and no index
// in a list. The kinds of values that are rare in a netconf (maps, interfaces,
// arrays, byte slices) still go to it.
//
// A fuzz target holds the two against each other: what this package accepts,
// encoding/json accepts with the same outcome.
package strict
