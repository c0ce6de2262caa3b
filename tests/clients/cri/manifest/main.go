// Prints a manifest of a DaemonSet as JSON, if Kubernetes knows each of its fields.
package main

import (
	"encoding/json"
	"io"
	"log"
	"os"

	apps "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

func main() {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		log.Fatal(err)
	}
	var set apps.DaemonSet
	if err := yaml.UnmarshalStrict(text, &set); err != nil {
		log.Fatal(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(set); err != nil {
		log.Fatal(err)
	}
}
