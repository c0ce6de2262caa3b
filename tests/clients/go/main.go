// A client of 9P2000.L by the Go package github.com/hugelgupf/p9, to test Ferry's server with somebody else's client.
//
// usage: client NETWORK ADDRESS ls DIR | read FILE | write FILE
package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"path"
	"sort"
	"strings"

	"github.com/hugelgupf/p9/p9"
)

func check(what string, err error) {
	if err != nil {
		log.Fatalf("%s: %v", what, err)
	}
}

func names(file string) []string {
	var names []string
	for _, name := range strings.Split(file, "/") {
		if name != "" && name != "." {
			names = append(names, name)
		}
	}
	return names
}

func list(dir p9.File) {
	_, _, err := dir.Open(p9.ReadOnly)
	check("open", err)
	var found []string
	for offset := uint64(0); ; {
		entries, err := dir.Readdir(offset, 4096)
		check("readdir", err)
		if len(entries) == 0 {
			break
		}
		for _, entry := range entries {
			found = append(found, entry.Name)
			offset = entry.Offset
		}
	}
	sort.Strings(found)
	fmt.Println(strings.Join(found, "\n"))
}

func read(file p9.File) {
	_, _, attr, err := file.GetAttr(p9.AttrMaskAll)
	check("getattr", err)
	_, _, err = file.Open(p9.ReadOnly)
	check("open", err)
	count, err := io.Copy(os.Stdout, io.NewSectionReader(file, 0, 1<<40))
	check("read", err)
	if uint64(count) != attr.Size {
		log.Fatalf("read %d bytes of %d", count, attr.Size)
	}
}

func write(dir p9.File, name string) {
	file, _, _, err := dir.Create(name, p9.ReadWrite, 0o640, 0, 0)
	check("create", err)
	data, err := io.ReadAll(os.Stdin)
	check("standard input", err)
	for offset := 0; offset < len(data); {
		count, err := file.WriteAt(data[offset:], int64(offset))
		check("write", err)
		offset += count
	}
	check("fsync", file.FSync())
	// No lock: this library sends Tlock without the number of the file.
}

func main() {
	log.SetFlags(0)
	network, address, verb, target := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	connection, err := net.Dial(network, address)
	check("dial", err)
	client, err := p9.NewClient(connection)
	check("version", err)
	root, err := client.Attach("/")
	check("attach", err)
	steps := names(target)
	if verb == "write" {
		steps = names(path.Dir(target))
	}
	_, file, err := root.Walk(steps)
	check("walk", err)
	switch verb {
	case "ls":
		list(file)
	case "read":
		read(file)
	case "write":
		write(file, path.Base(target))
	default:
		log.Fatalf("unknown verb %q", verb)
	}
	check("close", file.Close())
	check("close", root.Close())
	check("close", client.Close())
}
