//! A fleet of up to ten thousand pods against one Redis, simulated: what is lost until all breakers are open, who
//! probes, how near the pods' rates add up to the whole, and how much of it all Redis has to do.
//!
//! It is the plan for scale on paper. The state machines and the scripts are the project's own, the scripts in the Lua
//! that Redis has; the wires, the provider, the calls and the clock are not, and what they are taken to be is printed
//! above the tables. A seed makes all of it the same each time.
//!
//! With `make test` a small fleet shows what must hold; `make simulate` prints the tables.

mod breaker;
mod rate;
mod redis;
mod steady;
mod table;
mod traffic;
mod world;

use self::breaker::{Health, Return};
use self::rate::{Demand, Outcome};
use self::redis::Assumed;
use self::table::Table;
use self::world::{ANSWER, DEADLINE, Provider, ROLLOUT, TIMEOUT, WIRE};

#[test]
fn a_seed_gives_the_same_tables_each_time() {
    let tables =
        || (breaker::opening(&[8], &[1.0], &[2]), breaker::returning(&[8], &[1.0]), rate::rates(&[2]));
    assert_eq!(tables(), tables());
}

#[test]
fn nobody_probes_without_leave_while_the_fleet_has_it_open() {
    for seed in 0..3 {
        let returned = Return::simulate(breaker::setting(100, 1.0, seed), 40.0, ANSWER);
        assert_eq!(
            (returned.probes, returned.unleased),
            (2, 0),
            "seed {seed}: one that fails, one that succeeds"
        );
        assert!(returned.last < 70.0, "seed {seed}: all are closed again");
    }
}

#[test]
fn a_sick_pod_opens_nobody_elses_breaker() {
    let provider = Provider { sick: 1, ..Provider::default() };
    let health = Health::simulate(breaker::setting(100, 1.0, 1), provider, 10.0);
    assert_eq!((health.pods, health.fleet), (1, 0));
    assert!(health.opened > 0);
}

#[test]
fn failures_by_chance_open_nobodys_breaker() {
    let provider = Provider { failing: 0.01, ..Provider::default() };
    let health = Health::simulate(breaker::setting(100, 1.0, 1), provider, 60.0);
    assert_eq!((health.opened, health.fleet), (0, 0));
}

#[test]
fn pods_keep_to_a_rate_together() {
    for (demand, times) in [(Demand::Even, 1.0), (Demand::Even, 3.0), (Demand::Moves, 1.0)] {
        let it = Outcome::simulate(rate::setting(8, 1), demand, times * 200.0);
        // The burst within 20 s.
        assert!(it.most <= 200.0 + 50.0 / 20.0, "{demand:?}: {it:?}");
        assert!(it.least >= 200.0 * 0.8, "{demand:?}: {it:?}");
    }
}

#[test]
fn tables_of_a_fleet() {
    // Of other sizes it is for people to read.
    let sizes = std::env::var("HEDGEROW_SIMULATE").unwrap_or_else(|_| "8".to_owned());
    let sizes: Vec<usize> = sizes.split(',').map(|size| size.parse().expect("a number of pods")).collect();
    let quorum =
        std::env::var("HEDGEROW_SIMULATE_QUORUM").map_or(2, |quorum| quorum.parse().expect("a number"));
    let parts = std::env::var("HEDGEROW_SIMULATE_ONLY").unwrap_or_default();
    println!("{}", assumptions());
    let all: [(&str, &dyn Fn() -> Table); 5] = [
        ("opening", &|| breaker::opening(&sizes, &[0.01, 0.1, 1.0, 10.0], &[quorum])),
        ("returning", &|| breaker::returning(&sizes, &[0.1, 1.0, 10.0])),
        ("health", &|| breaker::health(&sizes, 1.0, 60.0, &[quorum])),
        ("rates", &|| rate::rates(&sizes)),
        ("steady", &|| steady::steady(&sizes, 15)),
    ];
    for (name, table) in all {
        if parts.is_empty() || parts.split(',').any(|part| part == name) {
            table().print();
        }
    }
}

fn assumptions() -> String {
    let Assumed { command, inner, field, delivery } = Assumed::default();
    format!(
        "Assumed: a message takes {} to {} µs one way; Redis does one thing at a time: a script takes {command:?} and \
         {inner:?} for each command in it and {field:?} for each field it looks through, a word that is published \
         {delivery:?} for each pod; a call waits for Redis for up to {TIMEOUT:?}; the provider answers after \
         {ANSWER:?}, well or dead; calls come by chance (Poisson) and wait for a token for up to {DEADLINE:?}; pods \
         start within {ROLLOUT} s. Breakers open after 5 failures in a row, for 30 s at first.",
        WIRE.start, WIRE.end
    )
}
