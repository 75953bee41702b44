package cni

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// The documentation is held to the code: what the code has must be described, and
// what the tables describe the code must have.

const docsRoot = "../../"

// readDocs gives the text of files below the module's root, by their names.
func readDocs(t *testing.T, patterns ...string) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, pattern := range patterns {
		names, err := filepath.Glob(docsRoot + pattern)
		must.That(t, err == nil && len(names) != 0, "%s: no files, %v", pattern, err)
		for _, name := range names {
			data, err := os.ReadFile(name)
			must.Succeed(t, err)
			texts[strings.TrimPrefix(name, docsRoot)] = string(data)
		}
	}
	return texts
}

func readDoc(t *testing.T, name string) string {
	t.Helper()
	return readDocs(t, name)[name]
}

// firstColumn gives the cells under a header, of all tables that have it first.
func firstColumn(text, header string) []string {
	var cells []string
	inside := false
	for line := range strings.Lines(text) {
		row, isRow := strings.CutPrefix(line, "| ")
		cell, _, _ := strings.Cut(row, " |")
		switch {
		case cell == header:
			inside = true
		case !isRow && !strings.HasPrefix(line, "|"):
			inside = false
		case inside && isRow:
			cells = append(cells, cell)
		}
	}
	return cells
}

// jsonFields gives the names that a struct, and those within it but for a runtime's, have in JSON.
func jsonFields(t reflect.Type) []string {
	var names []string
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" {
			names = append(names, name)
		}
		if f.Type.Kind() == reflect.Struct && name != "runtimeConfig" && name != "args" {
			names = append(names, jsonFields(f.Type)...)
		}
	}
	return names
}

// parseFile reads Go source of another package, whose names are not exported.
func parseFile(t *testing.T, name string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), docsRoot+name, nil, parser.SkipObjectResolution)
	must.Succeed(t, err)
	return f
}

// ipamFields gives the names in JSON of the ipam section's fields, for the types
// in process.
func ipamFields(t *testing.T) []string {
	t.Helper()
	structs := []string{"hostLocalConf", "Range", "routeConf", "staticConf", "addressConf", "DHCP", "request", "provide"}
	var names []string
	for _, file := range []string{"internal/cni/ipamconf.go", "ipam/range.go", "internal/cni/static.go", "internal/cni/result.go", "internal/cni/dhcpconf.go"} {
		ast.Inspect(parseFile(t, file), func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || !slices.Contains(structs, spec.Name.Name) {
				return true
			}
			structs = slices.DeleteFunc(structs, func(s string) bool { return s == spec.Name.Name })
			for _, f := range spec.Type.(*ast.StructType).Fields.List {
				if f.Tag == nil {
					continue
				}
				tag, err := strconv.Unquote(f.Tag.Value)
				must.Succeed(t, err)
				name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
				names = append(names, name)
			}
			return true
		})
	}
	must.That(t, len(structs) == 0, "package ipam has no types %q any more: where are its fields?", structs)
	return names
}

func TestDocsNameEveryField(t *testing.T) {
	t.Parallel()
	text := readDoc(t, "docs/config.md")
	fields := slices.Concat(jsonFields(reflect.TypeFor[NetConf]()), ipamFields(t))
	for _, name := range fields {
		expect.That(t, strings.Contains(text, "`"+name+"`"), "docs/config.md does not have the field `%s`", name)
	}
	capabilities := jsonFields(reflect.TypeFor[runtimeConfig]())
	for _, name := range capabilities {
		expect.That(t, strings.Contains(text, "`"+name+"`") || strings.Contains(text, `"`+name+`"`),
			"docs/config.md does not have runtimeConfig's %q", name)
	}
	tables := firstColumn(text, "field")
	must.That(t, len(tables) >= len(fields)/2, "found %d rows in tables of fields, %q", len(tables), tables)
	for _, cell := range tables {
		expect.That(t, slices.Contains(fields, strings.Trim(cell, "`")),
			"docs/config.md describes %s, which no configuration has", cell)
	}
}

// libraryCodes are the codes that the CNI library has names for.
var libraryCodes = map[string]uint{
	"ErrIncompatibleCNIVersion":      types.ErrIncompatibleCNIVersion,
	"ErrUnsupportedField":            types.ErrUnsupportedField,
	"ErrUnknownContainer":            types.ErrUnknownContainer,
	"ErrInvalidEnvironmentVariables": types.ErrInvalidEnvironmentVariables,
	"ErrIOFailure":                   types.ErrIOFailure,
	"ErrDecodingFailure":             types.ErrDecodingFailure,
	"ErrInvalidNetworkConfig":        types.ErrInvalidNetworkConfig,
	"ErrInvalidNetNS":                types.ErrInvalidNetNS,
	"ErrTryAgainLater":               types.ErrTryAgainLater,
	"ErrInternal":                    types.ErrInternal,
}

// errorCodes gives the constants of a file whose names begin with "code".
func errorCodes(t *testing.T, file string) map[string]uint {
	t.Helper()
	codes := map[string]uint{}
	ast.Inspect(parseFile(t, file), func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		for i, name := range spec.Names {
			if strings.HasPrefix(strings.ToLower(name.Name), "code") {
				codes[name.Name] = codeValue(t, name.Name, spec.Values[i])
			}
		}
		return true
	})
	return codes
}

// codeValue knows the forms in which codes are written: 100, uint(110), types.ErrX.
func codeValue(t *testing.T, name string, e ast.Expr) uint {
	t.Helper()
	switch e := e.(type) {
	case *ast.BasicLit:
		if v, err := strconv.ParseUint(e.Value, 0, 32); err == nil {
			return uint(v)
		}
	case *ast.CallExpr:
		return codeValue(t, name, e.Args[0])
	case *ast.SelectorExpr:
		if v, ok := libraryCodes[e.Sel.Name]; ok {
			return v
		}
	}
	t.Fatalf("constant %s has a value that this test cannot read", name)
	return 0
}

func TestDocsNameEveryErrorCode(t *testing.T) {
	t.Parallel()
	own := errorCodes(t, "internal/cni/errors.go")
	must.That(t, own["codeExists"] == codeExists && own["codePoolFull"] == codePoolFull,
		"the constants were not read right: %v", own)
	var codes []string
	for _, code := range own {
		codes = append(codes, strconv.Itoa(int(code)))
	}
	listed := firstColumn(readDoc(t, "docs/operating.md"), "code")
	for _, code := range codes {
		expect.That(t, slices.Contains(listed, code), "docs/operating.md has no row for error code %s", code)
	}
	for _, code := range listed {
		expect.That(t, slices.Contains(codes, code), "docs/operating.md has a row for error code %s, which nothing returns", code)
	}
}

// usage gives the help of each command, by its name, which cmd/tombolo's tests hold to the command.
func usage(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for section := range strings.SplitSeq(readDoc(t, "cmd/tombolo/testdata/commands.txt"), "# tombolo") {
		if name, text, ok := strings.Cut(section, "\n"); ok {
			all[strings.TrimSpace(name)] = text
		}
	}
	must.That(t, len(all) >= 15, "help has %d commands", len(all))
	return all
}

func TestDocsNameEveryCommand(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, doc := range readDocs(t, "README.md", "docs/*.md") {
		text.WriteString(doc)
	}
	for name, help := range usage(t) {
		if name == "" {
			continue // what all have
		}
		forms := regexp.MustCompile("`tombolo "+name+"([^`]*)`").FindAllStringSubmatch(text.String(), -1)
		expect.That(t, len(forms) != 0, "neither README.md nor docs has `tombolo %s`", name)
		own, _, _ := strings.Cut(help, "Global Flags:")
		_, own, _ = strings.Cut(own, "\nFlags:")
		for _, m := range regexp.MustCompile(`(?m)^ .*?(--[a-z-]+)`).FindAllStringSubmatch(own, -1) {
			if m[1] != "--help" && m[1] != "--version" && !slices.ContainsFunc(forms, func(form []string) bool { return strings.Contains(form[1], m[1]) }) {
				t.Errorf("neither README.md nor docs has `tombolo %s` with %s", name, m[1])
			}
		}
	}
}

// TestDocsNameCommandsThatExist looks at what is typed in blocks and within lines.
func TestDocsNameCommandsThatExist(t *testing.T) {
	t.Parallel()
	help := usage(t)
	data, err := os.ReadFile(docsRoot + "cmd/tombolod/main.go")
	must.Succeed(t, err)
	keeper := string(data)
	typed := regexp.MustCompile("(?m)(?:^|[`>] ?)(tombolod?) +([^`#|\n]*)")
	flags := regexp.MustCompile(`--[a-z-]+`)
	found := 0
	for file, text := range readDocs(t, "README.md", "docs/*.md", "deploy/*/README.md") {
		text = strings.ReplaceAll(text, "\n", " \n")
		for _, m := range typed.FindAllStringSubmatch(text, -1) {
			command := strings.Fields(m[2])
			if len(command) == 0 || !regexp.MustCompile(`^(--)?[a-z-]+$`).MatchString(command[0]) || !fenced(text, m[0]) {
				continue
			}
			found++
			in := keeper
			if m[1] == "tombolo" {
				name := command[0]
				if len(command) > 1 && help[name+" "+command[1]] != "" {
					name += " " + command[1]
				}
				if in = help[name]; in == "" && !strings.Contains(help[""], "\n  "+name+" ") { // cobra's own
					t.Errorf("%s: tombolo has no command %q", file, name)
					continue
				}
			}
			for _, flag := range flags.FindAllString(m[2], -1) {
				if flag != "--help" && !strings.Contains(in, flag) {
					t.Errorf("%s: %s %s: there is no flag %s", file, m[1], command[0], flag)
				}
			}
		}
	}
	expect.That(t, found >= 40, "found %d commands only", found)
}

// fenced says whether what was found is code, within a line or a block, and no sentence.
func fenced(text, found string) bool {
	return strings.HasPrefix(found, "`") || regexp.MustCompile("(?ms)^```sh *\n[^`]*^"+regexp.QuoteMeta(found)).MatchString(text)
}

// sources gives what the programs are made of, with quotation marks as they are printed.
func sources(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, dir := range []string{"bridge", "cmd", "dhcpc", "internal", "ipam", "network", "nft"} {
		err := filepath.WalkDir(docsRoot+dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			data, err := os.ReadFile(path)
			all.Write(data)
			return err
		})
		must.Succeed(t, err)
	}
	return strings.ReplaceAll(all.String(), `\"`, `"`)
}

// TestDocsNameMessagesThatExist takes the messages that the page on troubleshooting says
// what to do about, and the metrics: what is between ellipses and figures has to be in the code.
func TestDocsNameMessagesThatExist(t *testing.T) {
	t.Parallel()
	all, text := sources(t), readDoc(t, "docs/operating.md")
	found := 0
	for _, cell := range firstColumn(text, "message") {
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
			for _, part := range regexp.MustCompile(`…|\bN\b`).Split(m[1], -1) {
				if part = strings.TrimSpace(part); len(part) < 5 {
					continue
				}
				found++
				expect.Contains(t, all, part, "docs/operating.md says what to do about %q, and no message has", m[1])
			}
		}
	}
	expect.That(t, found >= 15, "found %d parts of messages only", found)
	for file, text := range readDocs(t, "README.md", "docs/*.md") {
		for _, metric := range regexp.MustCompile("`(tombolo_[a-z_]+[a-z])`").FindAllStringSubmatch(text, -1) {
			if !strings.Contains(all, `"`+metric[1]+`"`) {
				t.Errorf("%s: there is no metric %s", file, metric[1])
			}
		}
	}
}

// TestDocsNameFieldsOfJSONThatExist takes the names that the table of --json has.
func TestDocsNameFieldsOfJSONThatExist(t *testing.T) {
	t.Parallel()
	all := sources(t) + readDoc(t, "difference.go")
	_, section, _ := strings.Cut(readDoc(t, "docs/operating.md"), "### JSON\n")
	section, _, _ = strings.Cut(section, "\n## ")
	found := 0
	for _, shape := range regexp.MustCompile(`\{[^}]*\}|`+"`[A-Za-z]+`").FindAllString(section, -1) {
		for _, name := range regexp.MustCompile(`[A-Za-z0-9]+`).FindAllString(shape, -1) {
			if strings.Contains(section, "| `"+name) {
				continue // a command
			}
			found++
			expect.That(t, regexp.MustCompile(`json:"`+name+`[",]`).MatchString(all), "docs/operating.md: no JSON has %q", name)
		}
	}
	expect.That(t, found > 80, "found %d names only", found)
}

// jsonBlocks gives the blocks of JSON in a text in Markdown.
func jsonBlocks(text string) []string {
	var blocks []string
	for _, m := range regexp.MustCompile("(?ms)^```json\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

// networks gives the configurations for our plugin in a document: the document
// itself, or those in its list of plugins, with what libcni adds to them.
func networks(document string) ([][]byte, error) {
	var head struct {
		CNIVersion string            `json:"cniVersion"`
		Name       string            `json:"name"`
		Type       string            `json:"type"`
		Plugins    []json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal([]byte(document), &head); err != nil {
		return nil, err
	}
	if head.Type == "tombolo" {
		return [][]byte{[]byte(document)}, nil
	}
	var list [][]byte
	for _, raw := range head.Plugins {
		var plugin map[string]any
		if err := json.Unmarshal(raw, &plugin); err != nil {
			return nil, err
		}
		if plugin["type"] != "tombolo" {
			continue
		}
		plugin["cniVersion"], plugin["name"] = head.CNIVersion, head.Name
		data, err := json.Marshal(plugin)
		if err != nil {
			return nil, err
		}
		list = append(list, data)
	}
	return list, nil
}

// accepts reads a configuration as ADD does, as far as that goes without a kernel.
func accepts(t *testing.T, data []byte) error {
	t.Helper()
	conf, err := parseStrict(data)
	if err != nil {
		return err
	}
	if err := conf.acceptName(); err != nil || conf.IPAM.Type == typeDHCP {
		return err
	}
	c := (&Plugin{}).newCall()
	_, err = newAllocator(c.ipamRequest(conf, true))
	return err
}

func TestDocsHaveExamplesThatAreAccepted(t *testing.T) {
	t.Parallel()
	documents := readDocs(t, "deploy/*.conflist")
	for file, text := range readDocs(t, "README.md", "docs/*.md") {
		for i, block := range jsonBlocks(text) {
			documents[fmt.Sprintf("%s, JSON block %d", file, i+1)] = block
		}
	}
	found := 0
	for where, document := range documents {
		confs, err := networks(document)
		expect.Success(t, err, "%s", where)
		for _, conf := range confs {
			found++
			expect.Success(t, accepts(t, conf), "%s", where)
		}
	}
	expect.That(t, found >= 6, "found %d configurations only", found)
}

// anchors gives the names by which the headings of a page are linked to, as GitHub has them.
func anchors(text string) []string {
	var names []string
	fenced := false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		heading := strings.TrimLeft(line, "#")
		if fenced || heading == line || !strings.HasPrefix(heading, " ") {
			continue
		}
		name := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, strings.TrimSpace(heading))
		names = append(names, name)
	}
	return names
}

func TestDocsLinkToWhatIsThere(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`)
	pages := readDocs(t, "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/dev/*.md", "docs/dev/upstream/*.md", "bench/README.md", "deploy/*/README.md")
	for file, text := range pages {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			to := filepath.Join(filepath.Dir(file), m[1])
			if m[1] == "" {
				to = file
			}
			data, err := os.ReadFile(docsRoot + to)
			switch {
			case m[2] != "" && err == nil && !slices.Contains(anchors(string(data)), m[2]):
				t.Errorf("%s: %s has no heading #%s", file, to, m[2])
			case m[2] == "":
				_, err = os.Stat(docsRoot + to)
			}
			expect.Success(t, err, "%s", file)
		}
	}
}
