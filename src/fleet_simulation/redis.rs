//! Redis in a simulation: it runs the project's scripts in the Lua that Redis has, over keys in memory, one after
//! another, and each takes its time.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use mlua::{Function, Lua, LuaOptions, StdLib, Table, Value, Variadic};

/// What things cost the one thread of Redis. Measured with Redis 7.0 on a small virtual machine, which had no threads
/// for its sockets.
pub(super) struct Assumed {
    /// To receive and answer a script.
    pub(super) command: Duration,
    /// For each command in it.
    pub(super) inner: Duration,
    /// For each field that it looks through.
    pub(super) field: Duration,
    /// To tell one pod what was published.
    pub(super) delivery: Duration,
}

impl Default for Assumed {
    fn default() -> Self {
        Self {
            command: Duration::from_micros(15),
            inner: Duration::from_nanos(2_400),
            field: Duration::from_nanos(3_000),
            delivery: Duration::from_micros(15),
        }
    }
}

/// Some Monday, in milliseconds.
const EPOCH: u64 = 1_796_119_230_000;

/// The project's scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Script {
    Breaker,
    Rate,
    Beat,
}

impl Script {
    fn text(self) -> &'static str {
        match self {
            Self::Breaker => include_str!("../policy/breaker/breaker.lua"),
            Self::Rate => include_str!("../policy/rate_limit/rate.lua"),
            Self::Beat => include_str!("../fleet/beat.lua"),
        }
    }
}

/// What a command has brought about.
pub(super) struct Done {
    pub(super) reply: redis::Value,
    /// Words for all pods.
    pub(super) published: Vec<String>,
    /// How long it took, the delivery of words apart.
    pub(super) took: Duration,
}

pub(super) struct Redis {
    // Holds what the functions refer to.
    lua: Lua,
    scripts: [Function; 3],
    store: Rc<RefCell<Store>>,
}

impl Redis {
    pub(super) fn new(seed: u64) -> Self {
        let options = StdLib::STRING | StdLib::TABLE | StdLib::MATH;
        let lua = Lua::new_with(options, LuaOptions::new()).expect("Lua starts");
        let store = Rc::new(RefCell::new(Store::new(seed)));
        let within = store.clone();
        let call = lua.create_function(move |lua, arguments: Variadic<Value>| {
            let arguments: Vec<String> = arguments.iter().map(argument).collect();
            within.borrow_mut().call(&arguments).into_lua(lua)
        });
        let redis = lua.create_table().expect("a table");
        redis.set("call", call.expect("a function")).expect("a field");
        lua.globals().set("redis", redis).expect("a global");
        let scripts = [Script::Breaker, Script::Rate, Script::Beat].map(|script| {
            lua.load(script.text()).set_name(format!("{script:?}")).into_function().expect("a script")
        });
        Self { lua, scripts, store }
    }

    /// Runs a script, `since` the simulation's start.
    pub(super) fn run(&self, script: Script, key: &str, arguments: &[&str], since: Duration) -> Done {
        self.store.borrow_mut().begin(since);
        let globals = self.lua.globals();
        globals.set("KEYS", [key]).expect("a global");
        globals.set("ARGV", arguments).expect("a global");
        let result: Value = self.scripts[script as usize].call(()).expect("the script runs");
        let mut store = self.store.borrow_mut();
        let Assumed { command, inner, field, .. } = Assumed::default();
        Done {
            reply: reply(&result),
            published: std::mem::take(&mut store.published),
            took: command + inner * store.commands + field * store.fields,
        }
    }
}

/// As Redis takes a script's arguments.
fn argument(value: &Value) -> String {
    match value {
        Value::String(text) => text.to_string_lossy(),
        Value::Integer(number) => number.to_string(),
        Value::Number(number) => number.to_string(),
        other => panic!("a command takes no {}", other.type_name()),
    }
}

/// As Redis passes on what a script returns: fractions are cut off, a table ends at its first hole.
fn reply(value: &Value) -> redis::Value {
    match value {
        Value::String(text) => redis::Value::BulkString(text.as_bytes().to_vec()),
        Value::Integer(number) => redis::Value::Int(*number),
        Value::Number(number) => redis::Value::Int(*number as i64),
        Value::Table(table) => redis::Value::Array(elements(table).iter().map(reply).collect()),
        _ => redis::Value::Nil,
    }
}

fn elements(table: &Table) -> Vec<Value> {
    table.sequence_values().map(|value| value.expect("an element")).collect()
}

/// What a command answers within a script.
enum Answer {
    Number(f64),
    Text(String),
    None,
    Many(Vec<Self>),
}

impl Answer {
    fn of(text: Option<&String>) -> Self {
        text.map_or(Self::None, |text| Self::Text(text.clone()))
    }

    fn into_lua(self, lua: &Lua) -> mlua::Result<Value> {
        Ok(match self {
            Self::Number(number) => Value::Number(number),
            Self::Text(text) => Value::String(lua.create_string(text)?),
            Self::None => Value::Boolean(false),
            Self::Many(answers) => {
                let values = answers.into_iter().map(|answer| answer.into_lua(lua));
                Value::Table(lua.create_sequence_from(values.collect::<mlua::Result<Vec<_>>>()?)?)
            }
        })
    }
}

struct Store {
    hashes: HashMap<String, Kept<Hash>>,
    sets: HashMap<String, Kept<SortedSet>>,
    random: Rng,
    /// Microseconds.
    now: u64,
    /// Of the command at hand.
    commands: u32,
    fields: u32,
    published: Vec<String>,
}

/// A key's value and until when it is kept, in milliseconds.
#[derive(Default)]
struct Kept<T> {
    value: T,
    until: Option<u64>,
}

impl Store {
    fn new(seed: u64) -> Self {
        Self {
            hashes: HashMap::new(),
            sets: HashMap::new(),
            random: Rng::with_seed(seed),
            now: 0,
            commands: 0,
            fields: 0,
            published: Vec::new(),
        }
    }

    fn begin(&mut self, since: Duration) {
        self.now = EPOCH * 1000 + since.as_micros() as u64;
        (self.commands, self.fields) = (0, 0);
    }

    fn call(&mut self, arguments: &[String]) -> Answer {
        self.commands += 1;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match arguments[..] {
            ["TIME"] => {
                let (seconds, micros) = (self.now / 1_000_000, self.now % 1_000_000);
                Answer::Many(vec![Answer::Text(seconds.to_string()), Answer::Text(micros.to_string())])
            }
            ["PUBLISH", _, word] => {
                self.published.push(word.to_owned());
                Answer::Number(0.0)
            }
            ["HGET", key, field] => Answer::of(self.hash(key).get(field)),
            ["HMGET", key, ref fields @ ..] => {
                let hash = self.hash(key);
                Answer::Many(fields.iter().map(|field| Answer::of(hash.get(field))).collect())
            }
            ["HSET", key, ref pairs @ ..] => {
                assert!(pairs.len().is_multiple_of(2) && !pairs.is_empty(), "HSET takes pairs");
                let hash = self.hash(key);
                let is_new = pairs.chunks(2).map(|pair| hash.set(pair[0], pair[1]));
                Answer::Number(is_new.filter(|is_new| *is_new).count() as f64)
            }
            ["HDEL", key, ref fields @ ..] => {
                let hash = self.hash(key);
                Answer::Number(fields.iter().filter(|field| hash.remove(field)).count() as f64)
            }
            ["HLEN", key] => Answer::Number(self.hash(key).fields.len() as f64),
            ["HGETALL", key] => {
                let pairs = self.hash(key).fields.clone();
                self.pairs(pairs)
            }
            ["HRANDFIELD", key, count, "WITHVALUES"] => {
                let pairs = self.some(key, count.parse().expect("a number"));
                self.pairs(pairs)
            }
            ["ZADD", key, score, member] => Answer::Number(self.set(key).add(member, whole(score)).into()),
            ["ZREMRANGEBYSCORE", key, "-inf", most] => {
                Answer::Number(self.set(key).remove_up_to(whole(most)) as f64)
            }
            ["ZCARD", key] => Answer::Number(self.set(key).scores.len() as f64),
            ["PEXPIRE", key, millis] => self.expire(key, self.now / 1000 + whole(millis)),
            ["PEXPIREAT", key, at] => self.expire(key, whole(at)),
            _ => panic!("this Redis does not know {arguments:?}"),
        }
    }

    /// Up to `count` fields, each once.
    fn some(&mut self, key: &str, count: usize) -> Vec<(String, String)> {
        let Self { hashes, random, .. } = self;
        let fields = &live(hashes, key, self.now).fields;
        let mut places = BTreeSet::new();
        while places.len() < count.min(fields.len()) {
            places.insert(random.usize(..fields.len()));
        }
        places.into_iter().map(|place| fields[place].clone()).collect()
    }

    fn pairs(&mut self, pairs: Vec<(String, String)>) -> Answer {
        self.fields += pairs.len() as u32;
        let flat = pairs.into_iter().flat_map(|(field, value)| [Answer::Text(field), Answer::Text(value)]);
        Answer::Many(flat.collect())
    }

    fn hash(&mut self, key: &str) -> &mut Hash {
        live(&mut self.hashes, key, self.now)
    }

    fn set(&mut self, key: &str) -> &mut SortedSet {
        live(&mut self.sets, key, self.now)
    }

    fn expire(&mut self, key: &str, until: u64) -> Answer {
        if let Some(kept) = self.hashes.get_mut(key) {
            kept.until = Some(until);
        }
        if let Some(kept) = self.sets.get_mut(key) {
            kept.until = Some(until);
        }
        Answer::Number(1.0)
    }
}

fn live<'a, T: Default>(all: &'a mut HashMap<String, Kept<T>>, key: &str, now: u64) -> &'a mut T {
    let kept = all.entry(key.to_owned()).or_default();
    if kept.until.is_some_and(|until| until <= now / 1000) {
        *kept = Kept::default();
    }
    &mut kept.value
}

/// Redis wants whole numbers here; a script that brings others is wrong.
fn whole(text: &str) -> u64 {
    text.parse().expect("a whole number")
}

/// Fields in an order that the seed determines.
#[derive(Default)]
struct Hash {
    fields: Vec<(String, String)>,
    places: HashMap<String, usize>,
}

impl Hash {
    fn get(&self, field: &str) -> Option<&String> {
        self.places.get(field).map(|place| &self.fields[*place].1)
    }

    fn set(&mut self, field: &str, value: &str) -> bool {
        if let Some(place) = self.places.get(field) {
            value.clone_into(&mut self.fields[*place].1);
            return false;
        }
        self.places.insert(field.to_owned(), self.fields.len());
        self.fields.push((field.to_owned(), value.to_owned()));
        true
    }

    fn remove(&mut self, field: &str) -> bool {
        let Some(place) = self.places.remove(field) else { return false };
        self.fields.swap_remove(place);
        if let Some((moved, _)) = self.fields.get(place) {
            self.places.insert(moved.clone(), place);
        }
        true
    }
}

#[derive(Default)]
struct SortedSet {
    scores: HashMap<String, u64>,
    members: BTreeSet<(u64, String)>,
}

impl SortedSet {
    fn add(&mut self, member: &str, score: u64) -> bool {
        let old = self.scores.insert(member.to_owned(), score);
        if let Some(old) = old {
            self.members.remove(&(old, member.to_owned()));
        }
        self.members.insert((score, member.to_owned()));
        old.is_none()
    }

    fn remove_up_to(&mut self, most: u64) -> usize {
        let mut count = 0;
        while self.members.first().is_some_and(|(score, _)| *score <= most) {
            let gone = self.members.pop_first();
            self.scores.remove(&gone.expect("it was there").1);
            count += 1;
        }
        count
    }
}
