//! The whole path: an agent that knows of no proxy, the rules, hedgerow, a tool on another machine.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use tokio::process::Command;

use super::{BACKENDS, POD, POD6, PROXY, TOOL, TOOL6, TOOLS, curl, in_pod, redirected};
use crate::support::client::{Agent, Response};
use crate::support::command::finished;
use crate::support::hedgerow::{HedgerowProcess, as_user};
use crate::support::netns::Neighbour;
use crate::support::pki::{Pki, connector_trusting_pem};
use crate::support::upstream::{Reply, Upstream};

/// Hedgerow as in a pod, and the rules that send everything to it.
async fn start(policy: &str, backend: &str, arguments: &[&str]) -> HedgerowProcess {
    let hedgerow = HedgerowProcess::with(policy).transparent().user(PROXY).start().await;
    let port = hedgerow.transparent.port().to_string();
    redirected(&[&["--backend", backend, "--port", &port], arguments].concat()).await;
    hedgerow
}

/// A tool there, which says its name.
async fn tool(there: &Neighbour, ip: impl Into<IpAddr>, port: u16, name: &'static str) -> Upstream {
    Upstream::at(there.listener((ip.into(), port).into())).answering(move |_| Reply::ok(name)).await
}

/// GET on a connection of its own.
async fn get(to: impl Into<SocketAddr>, host: &str) -> Response {
    let mut agent = Agent::connect(to.into()).await;
    agent.send(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
    agent.read_response().await
}

/// How many of the tool's requests hedgerow brought: it tells each the deadline.
fn brought(tool: &Upstream) -> usize {
    tool.requests().iter().filter(|seen| seen.header("x-request-deadline").is_some()).count()
}

/// How many connections and requests hedgerow had.
async fn handled(hedgerow: &HedgerowProcess) -> f64 {
    hedgerow.metrics().await.value("hedgerow_requests_total", &[])
}

#[test]
fn what_an_agent_sends_to_a_tool_goes_through_hedgerow() {
    in_pod(async |there| {
        let pki = Pki::new();
        let plain = [tool(&there, TOOL, 80, "four").await, tool(&there, TOOL6, 80, "six").await];
        let encrypted = TOOLS.map(|ip| Upstream::at(there.listener((ip, 443).into())));
        let [four, six] = encrypted.map(|setup| setup.tls(pki.server(&["tool.test"])));
        let encrypted = [
            four.answering(|_| Reply::ok("four in TLS")).await,
            six.answering(|_| Reply::ok("six in TLS")).await,
        ];
        for (round, backend) in BACKENDS.into_iter().enumerate() {
            let policy = "upstreams: { quotes: { hosts: [tool.test] } }";
            let hedgerow = start(policy, backend, &["--ipv6", "on"]).await;
            for (nth, said) in ["four", "six"].into_iter().enumerate() {
                // The test is root, and an agent may be anybody.
                let tool = &plain[nth];
                assert_eq!(get((TOOLS[nth], 80), "tool.test").await.text(), said, "{backend}");
                let resolve = format!("tool.test:80:{}", bracketed(TOOLS[nth]));
                let answer = curl(1000, "http://tool.test/", &["--resolve", &resolve]).await;
                assert_eq!(answer, format!("{said}|200"), "{backend}");
                assert_eq!(brought(tool), 2 * (round + 1), "{backend}");

                let agent = Agent::connect((TOOLS[nth], 443).into()).await;
                let mut inside =
                    agent.tls(&pki.connector(), "tool.test").await.expect("the tool's certificate");
                inside.send("GET / HTTP/1.1\r\nHost: tool.test\r\n\r\n").await;
                assert_eq!(inside.read_response().await.text(), format!("{said} in TLS"), "{backend}");
                assert_eq!(encrypted[nth].connections(), round + 1, "{backend}");
            }
            for (outcome, count) in [("answered", 4.0), ("tunnel", 2.0)] {
                let labels = [("upstream", "quotes"), ("outcome", outcome)];
                hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == count).await;
            }
            let seen = plain[0].count();
            redirected(&["--remove", "--backend", backend]).await;
            assert_eq!(get((TOOL, 80), "tool.test").await.text(), "four");
            let directly = (plain[0].count() - seen, brought(&plain[0]));
            assert_eq!(directly, (1, 2 * (round + 1)), "without rules it goes past hedgerow");
        }
    });
}

fn bracketed(ip: IpAddr) -> String {
    if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() }
}

#[test]
fn tls_of_a_redirected_agent_ends_at_hedgerow_where_the_policy_says_so() {
    in_pod(async |there| {
        let pki = Pki::new();
        let tool = Upstream::at(there.listener((TOOL, 443).into())).tls(pki.server(&["tool.test"]));
        let tool = tool.answering(|_| Reply::ok("in TLS")).await;
        let policy = format!(
            "tls: {{ ca_dir: ca, ca_file: \"{}\" }}\nupstreams: {{ quotes: {{ hosts: [tool.test], intercept: true }} }}",
            pki.ca_file().display()
        );
        let hedgerow = start(&policy, "nft", &[]).await;
        let ca = fs::read(hedgerow.policy.folder().join("ca/ca.pem")).unwrap();
        let agent = Agent::connect((TOOL, 443).into()).await;
        let mut inside = agent.tls(&connector_trusting_pem(&ca), "tool.test").await.expect("the pod's leaf");
        inside.send("GET / HTTP/1.1\r\nHost: tool.test\r\n\r\n").await;
        assert_eq!((inside.read_response().await.text(), brought(&tool)), ("in TLS", 1));
    });
}

#[test]
fn an_address_that_nobody_has_is_redirected_as_well() {
    in_pod(async |there| {
        let tool = tool(&there, TOOL, 8080, "instead").await;
        for backend in BACKENDS {
            let policy = "upstreams: { quotes: { hosts: [tool.test], endpoint: \"http://10.77.0.1:8080\" } }";
            let _hedgerow = start(policy, backend, &[]).await;
            for nowhere in ["192.0.2.9", "2001:db8::9"] {
                let to = (nowhere.parse::<IpAddr>().unwrap(), 443);
                assert_eq!(get(to, "tool.test").await.text(), "instead", "{backend}");
            }
            redirected(&["--remove", "--backend", backend]).await;
        }
        assert_eq!(tool.count(), 6);
    });
}

#[test]
fn hedgerows_own_connections_go_out() {
    in_pod(async |there| {
        let tools = [tool(&there, TOOL, 80, "four").await, tool(&there, TOOL6, 80, "six").await];
        for (round, backend) in BACKENDS.into_iter().enumerate() {
            let hedgerow = start("{}", backend, &[]).await;
            for (ip, said) in TOOLS.into_iter().zip(["four", "six"]) {
                let answer = curl(PROXY, &format!("http://{}/", bracketed(ip)), &[]).await;
                assert_eq!(answer, format!("{said}|200"), "{backend}");
            }
            // A forward proxy's calls are such as well.
            assert_eq!(hedgerow.get("http://10.77.0.1/").await.text(), "four");
            hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[]) == 1.0).await;
            assert_eq!((brought(&tools[0]), brought(&tools[1])), (round + 1, 0), "{backend}");
            assert!(!hedgerow.stderr.text().contains("loop"), "{}", hedgerow.stderr.text());
            redirected(&["--remove", "--backend", backend]).await;
        }
    });
}

#[test]
fn what_is_left_out_goes_directly() {
    in_pod(async |there| {
        there.run("ip", &["addr", "add", "10.77.0.9/32", "dev", "eth0"]);
        there.run("ip", &["addr", "add", "fd77::9/128", "dev", "eth0", "nodad"]);
        let places: [(IpAddr, u16); 6] = [
            // Another port than the listed ones.
            (TOOL.into(), 5432),
            (TOOL6.into(), 5432),
            // Excluded destinations.
            (Ipv4Addr::new(10, 77, 0, 9).into(), 80),
            ("fd77::9".parse().unwrap(), 80),
            // Excluded ports.
            (TOOL.into(), 8080),
            (TOOL6.into(), 8080),
        ];
        let mut tools = Vec::new();
        for (ip, port) in places {
            tools.push(tool(&there, ip, port, "directly").await);
        }
        let caught = tool(&there, TOOL, 80, "redirected").await;
        for (round, backend) in BACKENDS.into_iter().enumerate() {
            let excluded =
                ["--exclude-ports", "8080,8081", "--exclude-cidrs", "10.77.0.9,10.99.0.0/16,fd77::9"];
            let _hedgerow =
                start("{}", backend, &[&["--ports", "80,443,8080"][..], &excluded].concat()).await;
            for (tool, place) in tools.iter().zip(places) {
                assert_eq!(get(place, "tool.test").await.text(), "directly");
                assert_eq!((tool.count(), brought(tool)), (round + 1, 0), "{backend}: {place:?}");
            }
            assert_eq!(get((TOOL, 80), "tool.test").await.text(), "redirected");
            assert_eq!(brought(&caught), round + 1, "{backend}");
            redirected(&["--remove", "--backend", backend]).await;
        }
    });
}

#[test]
fn all_ports_are_redirected_but_for_the_excluded() {
    in_pod(async |there| {
        let tools = [tool(&there, TOOL, 9, "one").await, tool(&there, TOOL, 65535, "other").await];
        for (nth, backend) in BACKENDS.into_iter().enumerate() {
            let _hedgerow = start("{}", backend, &["--ports", "all", "--exclude-ports", "65535"]).await;
            assert_eq!(get((TOOL, 9), "tool.test").await.text(), "one");
            assert_eq!(get((TOOL, 65535), "tool.test").await.text(), "other");
            assert_eq!((brought(&tools[0]), brought(&tools[1])), (nth + 1, 0), "{backend}");
            redirected(&["--remove", "--backend", backend]).await;
        }
    });
}

#[test]
fn loopback_the_pods_own_addresses_and_what_comes_in_are_untouched() {
    in_pod(async |there| {
        let places = ["127.0.0.1", "::1", "10.77.0.2", "fd77::2"].map(|ip| ip.parse::<IpAddr>().unwrap());
        let mut servers = Vec::new();
        for ip in places {
            servers.push(Upstream::on(ip).port(80).answering(|_| Reply::ok("own")).await);
        }
        for (round, backend) in BACKENDS.into_iter().enumerate() {
            let hedgerow = start("{}", backend, &["--ports", "all", "--reject-quic"]).await;
            for ip in places {
                assert_eq!(get((ip, 80), "tool.test").await.text(), "own", "{backend}");
            }
            for ip in [IpAddr::from(POD), POD6.into()] {
                let mut curl = there.command("curl");
                let url = format!("http://{}/", bracketed(ip));
                curl.args(["-sS", "--max-time", "10", "--noproxy", "*", &url]);
                assert_eq!(finished(Command::from(curl)).await.stdout, "own", "{backend}");
            }
            let seen: Vec<_> = servers.iter().map(Upstream::count).collect();
            assert_eq!(seen, [1, 1, 2, 2].map(|count| count * (round + 1)), "{backend}");
            assert!(servers.iter().all(|server| brought(server) == 0), "{backend}");
            assert_eq!(handled(&hedgerow).await, 0.0, "{backend}");
            redirected(&["--remove", "--backend", backend]).await;
        }
    });
}

// It would dial itself without end.
#[test]
fn the_transparent_port_itself_is_no_way_in() {
    in_pod(async |there| {
        for backend in BACKENDS {
            let hedgerow = start("{}", backend, &["--ports", "all"]).await;
            let port = hedgerow.transparent.port();
            for ip in ["127.0.0.1", "::1"] {
                let mut agent = Agent::connect((ip.parse::<IpAddr>().unwrap(), port).into()).await;
                agent.send("GET / HTTP/1.1\r\nHost: tool.test\r\n\r\n").await;
                agent.ended().await;
            }
            hedgerow.stderr.until(|line| line.contains("not redirected")).await;
            assert_eq!(handled(&hedgerow).await, 0.0, "{backend}");
            for ip in [IpAddr::from(POD), POD6.into()] {
                assert!(
                    Agent::try_connect((ip, port).into()).await.is_err(),
                    "{backend}: it is on loopback alone"
                );
                let mut curl = there.command("curl");
                curl.args([
                    "-sS",
                    "--max-time",
                    "10",
                    "--noproxy",
                    "*",
                    &format!("http://{}:{port}/", bracketed(ip)),
                ]);
                let refused = finished(Command::from(curl)).await;
                assert_eq!(refused.code, 7, "{backend}: curl could not connect: {}", refused.stderr);
            }
            redirected(&["--remove", "--backend", backend]).await;
        }
    });
}

#[test]
fn quic_is_refused_at_once_where_that_is_asked_for() {
    in_pod(async |there| {
        let servers = TOOLS.map(|ip| there.datagrams((ip, 443).into()));
        for backend in BACKENDS {
            for (arguments, is_refused) in [(&["--reject-quic"][..], true), (&[], false)] {
                redirected(&[&["--backend", backend], arguments].concat()).await;
                for (ip, server) in TOOLS.into_iter().zip(&servers) {
                    let local: IpAddr = if ip.is_ipv4() { POD.into() } else { POD6.into() };
                    let client = UdpSocket::bind((local, 0)).unwrap();
                    let sent = client.send_to(b"agent", (ip, 443));
                    match is_refused {
                        true => {
                            assert_eq!(sent.unwrap_err().kind(), ErrorKind::PermissionDenied, "{backend}")
                        }
                        false => assert_eq!(sent.unwrap(), 5, "{backend}"),
                    }
                    let others = client.send_to(b"dns", (ip, 53));
                    assert_eq!(others.unwrap(), 3, "another port is nobody's business");
                    // hedgerow's own pass, and come after what is not to come.
                    let mut bash = as_user(PROXY, "bash");
                    bash.args(["-c", &format!("printf proxy > /dev/udp/{ip}/443")]);
                    assert_eq!(finished(Command::from(bash)).await.code, 0, "{backend}");
                    let expected: &[&str] = if is_refused { &["proxy"] } else { &["agent", "proxy"] };
                    let server = tokio::net::UdpSocket::from_std(server.try_clone().unwrap()).unwrap();
                    for said in expected {
                        let mut datagram = [0; 16];
                        let length = crate::support::soon(server.recv(&mut datagram)).await.unwrap();
                        assert_eq!(&datagram[..length], said.as_bytes(), "{backend}");
                    }
                }
            }
            redirected(&["--remove", "--backend", backend]).await;
        }
    });
}
