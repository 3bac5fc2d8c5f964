// Agents for libraries on node:http that read no proxy variable, or that Node before 24 leaves without one.
import { HttpProxyAgent } from 'http-proxy-agent';
import { HttpsProxyAgent } from 'https-proxy-agent';

const proxy = process.env.https_proxy;

/** For `http://` in absolute-form, and for `https://` through a tunnel; none where no proxy is told. */
export const agents = proxy
  ? {
      http: new HttpProxyAgent(proxy, { keepAlive: true }),
      https: new HttpsProxyAgent(proxy, { keepAlive: true }),
    }
  : {};

/** Through a tunnel whatever the scheme, as a WebSocket needs it. */
export const tunnel = proxy && new HttpsProxyAgent(proxy);
