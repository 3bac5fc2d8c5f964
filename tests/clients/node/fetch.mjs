// fetch as a user gets it through a proxy. Node's own follows NODE_USE_ENV_PROXY from 24 on; before, no variable
// reaches it, and one takes undici's with the agent that reads the environment. Both tunnel for `http://` too.
import * as undici from 'undici';

const builtIn = Number(process.versions.node.split('.')[0]) >= 24;
const dispatcher = builtIn ? undefined : new undici.EnvHttpProxyAgent();

export const fetch = builtIn ? globalThis.fetch : (url, options) => undici.fetch(url, { ...options, dispatcher });
