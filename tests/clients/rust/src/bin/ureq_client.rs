//! ureq, which opens a tunnel for `http://` too. With the argument `built-in-roots` it trusts those that were
//! compiled into it, its default, which no variable changes; otherwise those of the system.

use std::io::{BufRead, BufReader};

use clients::{ASKED, Case, Failure, PATIENCE, Seen, Stopwatch, serve};
use ureq::http::Response;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

fn main() {
    let built_in = std::env::args().any(|argument| argument == "built-in-roots");
    serve(|case| carry_out(case, built_in));
}

fn carry_out(case: &Case<'_>, built_in: bool) -> Result<Seen, Failure> {
    let roots = if built_in { RootCerts::WebPki } else { RootCerts::PlatformVerifier };
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(PATIENCE))
        .tls_config(TlsConfig::builder().root_certs(roots).build());
    let agent = Agent::from(config.build());
    if case.verb == "twice" {
        call(&agent, case)?;
    }
    call(&agent, case)
}

fn call(agent: &Agent, case: &Case<'_>) -> Result<Seen, Failure> {
    let mut events = Stopwatch::start();
    let response = send(agent, case)?;
    let status = response.status().as_u16();
    let mut body = String::new();
    let mut reader = BufReader::new(response.into_body().into_reader());
    let mut line = String::new();
    while reader.read_line(&mut line)? > 0 {
        events.piece(&line);
        body.push_str(&line);
        line.clear();
    }
    Ok(Seen { status, version: "1.1", body, events })
}

fn send(agent: &Agent, case: &Case<'_>) -> Result<Response<Body>, Failure> {
    if case.verb == "post" {
        let mut request = agent.post(case.url).header("content-type", "application/json");
        for (name, value) in &case.headers {
            request = request.header(*name, *value);
        }
        return Ok(request.send(ASKED)?);
    }
    let mut request = agent.get(case.url);
    for (name, value) in &case.headers {
        request = request.header(*name, *value);
    }
    Ok(request.call()?)
}
