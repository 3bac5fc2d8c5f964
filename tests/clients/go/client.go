// net/http of Go with its default transport, which reads the proxy variables and SSL_CERT_FILE by itself.
// It talks with the runner as python/talk.py does.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

const (
	patience = 10 * time.Second
	asked    = `{"ask": "hello"}`
)

type report struct {
	Status  int     `json:"status,omitempty"`
	HTTP    string  `json:"http,omitempty"`
	Body    string  `json:"body"`
	Events  []int64 `json:"events_ms"`
	Failure string  `json:"failure,omitempty"`
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		words := strings.Split(lines.Text(), "\t")
		seen, err := carryOut(words[0], words[1], words[2:])
		if err != nil {
			seen = report{Failure: err.Error()}
		}
		out.Encode(seen)
	}
}

func carryOut(verb, url string, fields []string) (report, error) {
	client := &http.Client{Timeout: patience, Transport: http.DefaultTransport.(*http.Transport).Clone()}
	defer client.CloseIdleConnections()
	if verb == "twice" {
		if _, err := call(client, verb, url, fields); err != nil {
			return report{}, err
		}
	}
	return call(client, verb, url, fields)
}

func call(client *http.Client, verb, url string, fields []string) (seen report, err error) {
	method, body := http.MethodGet, io.Reader(nil)
	if verb == "post" {
		method, body = http.MethodPost, strings.NewReader(asked)
	}
	request, err := http.NewRequest(method, url, body)
	if err != nil {
		return seen, err
	}
	for _, field := range fields {
		name, value, _ := strings.Cut(field, ": ")
		request.Header.Set(name, value)
	}
	if verb == "post" {
		request.Header.Set("content-type", "application/json")
	}
	began := time.Now()
	response, err := client.Do(request)
	if err != nil {
		return seen, err
	}
	defer response.Body.Close()
	var text strings.Builder
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "data:") {
			seen.Events = append(seen.Events, time.Since(began).Milliseconds())
		}
		fmt.Fprintln(&text, lines.Text())
	}
	seen.Status, seen.Body = response.StatusCode, text.String()
	seen.HTTP = strings.TrimSuffix(strings.TrimPrefix(response.Proto, "HTTP/"), ".0")
	return seen, lines.Err()
}
